"""The callback in a real Trainer: what it writes, what it removes, what a run resumes from."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt8

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")

from chain_command_kit import age  # noqa: E402
from lattice_kit import check_weights, record  # noqa: E402
from ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainer_kit import LAST, losses, names_in, trainer  # noqa: E402

from ckpt8.chaining import jobs  # noqa: E402
from ckpt8.core.errors import InputError, OutputError, UsageError  # noqa: E402
from ckpt8.integrations import transformers as integration  # noqa: E402
from ckpt8.integrations.transformers import Ckpt8Callback, restored_checkpoint, temporary_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")


EVALUATED = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


class StopAt(transformers.TrainerCallback):
    """Ends a run in the middle, as a preempted job would."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("whole"), save_strategy="no")
    run.train()
    return losses(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "drift", "options"),
    [
        ("lossless", 0.0, {}),
        ("flash", 1e-3, {"background": True}),
        ("flash", 1e-3, {"keep_original": False}),
        ("archive", 1e-2, {"keep_original": False}),
    ],
)
def test_an_interrupted_run_goes_on(preset, drift, options, uninterrupted, tmp_path):
    stopped = trainer(tmp_path, [Ckpt8Callback(preset=preset, **options), StopAt(10)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train(resume_from_checkpoint=restored_checkpoint(tmp_path))
    for thread in threading.enumerate():
        if thread.name == "ckpt8-compress":
            thread.join()
    assert {"checkpoint-4.ckpt8", "checkpoint-8.ckpt8"} <= set(names_in(tmp_path))
    assert (tmp_path / "checkpoint-8").exists() == options.get("keep_original", True)
    if options.get("keep_original", True):
        # What a user keeps of a run: the containers.
        for step in (4, 8):
            (tmp_path / f"checkpoint-{step}").rename(tmp_path / f"original-{step}")
    run = trainer(tmp_path, [Ckpt8Callback(preset=preset, **options)])
    with temporary_checkpoint(tmp_path) as path:
        assert path == str(tmp_path / "checkpoint-8")
        run.train(resume_from_checkpoint=path)
    assert not (tmp_path / "checkpoint-8").exists()
    found = losses(run)
    assert found.keys() == uninterrupted.keys()
    assert max(abs(found[step] - uninterrupted[step]) for step in range(9, LAST + 1)) <= drift
    if drift:
        assert any(found[step] != uninterrupted[step] for step in range(9, LAST + 1))
    assert not ckpt8.verify(tmp_path / "checkpoint-12.ckpt8").failures


@pytest.mark.slow
def test_a_run_that_begins_again_beside_later_containers_keeps_what_it_saves(tmp_path):
    """Their steps are higher: by these the newest one is the oldest."""
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    for step in (100, 102):
        ckpt8.compress(tmp_path / "x.pt", tmp_path / f"checkpoint-{step}.ckpt8")
    (tmp_path / "x.pt").unlink()
    run = trainer(tmp_path, [Ckpt8Callback(keep_original=False)], save_steps=6, save_total_limit=2)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-102.ckpt8: is of step 102, and training begins at step 0"):
        run.train()
    assert names_in(tmp_path) == ["checkpoint-102.ckpt8", "checkpoint-12.ckpt8"]
    assert not ckpt8.verify(tmp_path / "checkpoint-12.ckpt8").failures


@pytest.mark.by_default("best")
@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_what_is_being_read_is_not_rotated_away(strategy, tmp_path, monkeypatch):
    """A compression that takes longer than the steps between two saves, of a directory that the next save removes."""
    compress, done = ckpt8.compress, []

    def slow(source, target, **options):
        time.sleep(0.2)
        done.append(source.name)
        return compress(source, target, **options)

    monkeypatch.setattr("ckpt8.integrations.transformers.compress", slow)
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"}
    arguments = best if strategy == "best" else {"save_steps": 2}
    trainer(tmp_path, [Ckpt8Callback(background=True)], save_total_limit=1, max_steps=8, **arguments).train()
    assert len(done) > 2
    assert names_in(tmp_path) == [done[-1], f"{done[-1]}.ckpt8"]
    assert not ckpt8.verify(tmp_path / f"{done[-1]}.ckpt8", tmp_path / done[-1]).failures


@pytest.mark.by_default("1")
@pytest.mark.parametrize("limit", [1, 2])
def test_a_checkpoint_that_is_no_longer_the_best_is_removed(limit, tmp_path):
    """With a limit of 1 Trainer removes it before the callback does."""
    callback = Ckpt8Callback(keep_original=False, strict=True)
    run = trainer(tmp_path, [callback], **EVALUATED, save_total_limit=limit, max_steps=6)
    run.train()
    best = run.state.best_model_checkpoint
    assert best is not None
    directories = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [str(path) for path in directories] == [best]


def test_a_best_checkpoint_whose_container_was_damaged_since_stays(tmp_path):
    """It was verified when it was written; until another is the best, anything may happen to it."""
    container = tmp_path / "checkpoint-2.ckpt8"

    class Damage(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                content = container.read_bytes()
                container.write_bytes(content.replace(content[len(content) // 2 :][:16], bytes(16)))

    run = trainer(tmp_path, [Ckpt8Callback(keep_original=False), Damage()], max_steps=4, **EVALUATED)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-2: is kept, .*checkpoint-2\.ckpt8"):
        run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-2.ckpt8", "checkpoint-4", "checkpoint-4.ckpt8"]


def test_an_old_container_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    def denied(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(integration, "remove_container", denied)
    run = trainer(tmp_path, [Ckpt8Callback(keep_original=False)], max_steps=8, save_total_limit=1)
    with pytest.warns(RuntimeWarning, match=r"^\S*checkpoint-4\.ckpt8: cannot be removed: Permission denied$"):
        run.train()
    assert names_in(tmp_path) == ["checkpoint-4.ckpt8", "checkpoint-8.ckpt8"]


def test_a_container_that_differs_keeps_the_directory(tmp_path, monkeypatch):
    compress = ckpt8.compress

    def damaged(source, target, **options):
        compress(source, target, **options)
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 1
        target.write_bytes(content)

    monkeypatch.setattr("ckpt8.integrations.transformers.compress", damaged)
    run = trainer(tmp_path, [Ckpt8Callback(keep_original=False)], max_steps=4)
    with pytest.warns(RuntimeWarning, match="checkpoint-4: was not compressed"):
        run.train()
    assert (tmp_path / "checkpoint-4").is_dir()
    assert restored_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_a_crash_before_and_in_the_removal(tmp_path, monkeypatch):
    """Killed between writing and removing, both are there; killed while removing, what is left is no checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(integration, "remove_as_verified", _killed)
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, [Ckpt8Callback(keep_original=False)]).train()
    assert names_in(tmp_path) == ["checkpoint-4", "checkpoint-4.ckpt8"]
    assert restored_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "remove", _half_removed)
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, [Ckpt8Callback(keep_original=False)]).train()
    (left,), container = tmp_path.glob(".checkpoint-4.*.ckpt8-removing"), tmp_path / "checkpoint-4.ckpt8"
    assert names_in(tmp_path) == [left.name, container.name]
    sound = container.read_bytes()
    container.write_bytes(sound.replace(sound[len(sound) // 2 :][:16], bytes(16)))
    with pytest.raises(InputError, match=f"not finished: .*; what is left of it is {left}, with files missing"):
        trainer(tmp_path, [Ckpt8Callback(keep_original=False, strict=True)]).train()
    assert left.is_dir()
    container.write_bytes(sound)
    run = trainer(tmp_path, [Ckpt8Callback(keep_original=False)], max_steps=8)
    with temporary_checkpoint(tmp_path) as path:
        run.train(resume_from_checkpoint=path)
    assert names_in(tmp_path) == ["checkpoint-4.ckpt8", "checkpoint-8.ckpt8"]


def _killed(*_):
    raise KeyboardInterrupt


def _half_removed(path):
    (path / "optimizer.pt").unlink()
    raise KeyboardInterrupt


def test_where_a_run_resumes_from(tmp_path):
    assert restored_checkpoint(tmp_path / "not-there") is None
    assert restored_checkpoint(tmp_path) is None
    with temporary_checkpoint(tmp_path) as path:
        assert path is None
    trainer(tmp_path, [Ckpt8Callback(preset="lossless")], max_steps=8).train()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-x.ckpt8").write_bytes(b"")
    assert restored_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    with temporary_checkpoint(tmp_path) as path:
        assert path == str(tmp_path / "checkpoint-8")
    assert (tmp_path / "checkpoint-8").is_dir()
    (tmp_path / "checkpoint-8").rename(tmp_path / "kept")
    (tmp_path / "checkpoint-9").rmdir()
    later = trainer(tmp_path, [Ckpt8Callback()], max_steps=5, save_strategy="no")
    newer = rf"checkpoint-8\.ckpt8: is of step 8, .* step 4, .*restored_checkpoint\('{tmp_path}'\)"
    with pytest.warns(RuntimeWarning, match=newer):
        later.train(resume_from_checkpoint=True)
    later.train(resume_from_checkpoint=str(tmp_path / "kept"))  # as far as that
    other = restored_checkpoint(tmp_path, tmp_path / "elsewhere")
    assert other == str(tmp_path / "elsewhere")
    for path in (tmp_path / "kept").iterdir():
        assert (tmp_path / "elsewhere" / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "checkpoint-8").mkdir()
    with pytest.raises(OutputError, match=r"checkpoint-8: is not complete \(no trainer_state.json\)"):
        restored_checkpoint(tmp_path)
    (tmp_path / "checkpoint-8").rmdir()
    container = tmp_path / "checkpoint-8.ckpt8"
    container.write_bytes(container.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"checkpoint-8.ckpt8"):
        restored_checkpoint(tmp_path)
    assert not (tmp_path / "checkpoint-8").exists()


def _both_ranks(rank, folder):
    assert restored_checkpoint(f"{folder}/none") is None
    path = restored_checkpoint(f"{folder}/run")
    assert path == f"{folder}/run/checkpoint-4"
    with temporary_checkpoint(f"{folder}/run") as again:
        assert again == path
    with pytest.raises((InputError, OutputError), match="checkpoint-1"):
        restored_checkpoint(f"{folder}/damaged")
    callback, control = Ckpt8Callback(), transformers.TrainerControl()
    arguments = transformers.TrainingArguments(output_dir=f"{folder}/run", report_to=[], use_cpu=True)
    state = transformers.TrainerState(global_step=4, is_world_process_zero=rank == 0)
    (Path(folder) / "run" / "checkpoint-4.ckpt8").unlink(missing_ok=True)
    if rank == 1:
        # What this rank still writes when the other is done.
        time.sleep(0.2)
        (Path(folder) / "run" / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"mine")
    callback.on_save(arguments, state, control)
    dist.barrier()
    with ckpt8.open(f"{folder}/run/checkpoint-4.ckpt8") as file:
        assert "rng_state_1.pth" in {member.path for member in file.manifest.members}


@pytest.mark.slow
def test_ranks_wait_for_each_other(tmp_path):
    trainer(tmp_path / "run", [Ckpt8Callback(keep_original=False)], max_steps=4).train()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint-1.ckpt8").write_bytes(b"x" * 100)
    run_ranks(_both_ranks, 2, str(tmp_path))


def test_arguments_are_checked_before_the_run():
    for said, options in (
        ("preset 'best'", {"preset": "best"}),
        (r"a budget is a number of steps from 0\.01 to 10, not 11", {"budget": 11}),
        ("rule", {"rules": ["nonsense"]}),
        (r"base is 'auto' or None, not 'run\.ckpt8'", {"base": "run.ckpt8"}),
    ):
        with pytest.raises(UsageError, match=said):
            Ckpt8Callback(**options)


@pytest.mark.parametrize(
    ("module", "package", "blocked"),
    [("transformers", "transformers", ["transformers"]), ("lightning", "lightning", ["lightning", "lightning_fabric"])],
)
def test_without_the_framework_one_line_says_so(module, package, blocked, run_program):
    program = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {blocked}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import ckpt8, ckpt8.compressing.compress\n"
        "try:\n"
        f"    import ckpt8.integrations.{module}\n"
        "except ImportError as exc:\n"
        "    print(exc)\n"
    )
    assert run_program(program)[0] == f"ckpt8.integrations.{module} needs {package}: pip install {package}"


def test_ckpt8_itself_imports_no_framework(run_program):
    program = (
        "import sys, ckpt8, ckpt8.compressing.compress, ckpt8.cli.app\n"
        "print([n for n in sys.modules if n.startswith(('transformers', 'lightning', 'ckpt8.integrations'))])"
    )
    assert run_program(program)[0] == "[]"


# Chains that the callback writes


def run_chain(folder, *, keep_original=True, resume=None, **arguments):
    settings = {"save_steps": 2, "max_steps": 14, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    callback = Ckpt8Callback(preset="archive", base="auto", keep_original=keep_original)
    trained = trainer(folder, [callback], **{**settings, "save_total_limit": 2, **arguments})
    trained.train(resume_from_checkpoint=resume)
    return trained


@pytest.mark.slow
def test_the_limit_breaks_no_chain(tmp_path):
    """The saves 0 to 6 are one chain: 5 needs 4 and 0, and so does 6."""
    run_chain(tmp_path)
    originals = [tmp_path / "checkpoint-12", tmp_path / "checkpoint-14"]
    containers = [path.with_name(f"{path.name}.ckpt8") for path in originals]
    assert names_in(tmp_path) == ["bases", *sorted(path.name for path in (*originals, *containers))]
    assert [(record(path).place, record(path).links) for path in containers] == [(5, 2), (6, 2)]
    assert len(names_in(tmp_path / "bases")) == 2
    for container, original in zip(containers, originals, strict=True):
        assert not ckpt8.verify(container, original).failures
        check_weights(container, load_file(original / "model.safetensors"))


def test_without_hard_links_every_container_is_whole(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be linked") as warned:
        run_chain(tmp_path, max_steps=4)
    assert len(warned) == 1
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-2.ckpt8", "checkpoint-4", "checkpoint-4.ckpt8"]
    assert record(tmp_path / "checkpoint-4.ckpt8") is None


WORST = {**EVALUATED, "metric_for_best_model": "eval_loss", "greater_is_better": True}
"""The loss that is to be as large as possible is that of the first evaluation."""


@pytest.mark.slow
def test_the_best_checkpoint_stays_whole(tmp_path):
    trained = run_chain(tmp_path, keep_original=False, **WORST, save_total_limit=1, max_steps=8)
    best = trained.state.best_model_checkpoint
    kept = [name for name in names_in(tmp_path) if name.endswith(".ckpt8")]
    assert f"{os.path.basename(best)}.ckpt8" in kept  # noqa: PTH119
    for name in kept:
        assert not ckpt8.verify(tmp_path / name).failures
        ckpt8.restore(tmp_path / name, tmp_path / f"back-{name}")


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path, monkeypatch):
    compress = ckpt8.compress
    with monkeypatch.context() as patch:

        def killed(source, target, **options):
            if source.name == "checkpoint-8":
                raise KeyboardInterrupt
            return compress(source, target, **options)

        patch.setattr("ckpt8.integrations.transformers.compress", killed)
        with pytest.raises(KeyboardInterrupt):
            run_chain(tmp_path, keep_original=False)
    assert names_in(tmp_path) == ["bases", "checkpoint-4.ckpt8", "checkpoint-6.ckpt8", "checkpoint-8"]
    for step in (4, 6):
        assert not ckpt8.verify(tmp_path / f"checkpoint-{step}.ckpt8").failures
    (tmp_path / "checkpoint-8").rename(tmp_path / "half")
    with temporary_checkpoint(tmp_path) as path:
        assert path == str(tmp_path / "checkpoint-6")
        run_chain(tmp_path, keep_original=False, resume=path, max_steps=10)
    for step in (8, 10):
        assert not ckpt8.verify(tmp_path / f"checkpoint-{step}.ckpt8").failures


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_the_best_checkpoint_stays_where_trainer_looks_for_it(background, limit, tmp_path):
    callback = Ckpt8Callback(keep_original=False, background=background)
    run = trainer(tmp_path, [callback], **WORST, save_total_limit=limit, max_steps=6)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-2.ckpt8", "checkpoint-6.ckpt8"]
    first = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert all(first[name].equal(tensor) for name, tensor in run.model.state_dict().items())


@pytest.mark.slow
def test_a_failure_is_a_warning_and_keeps_the_directory(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OutputError("the disk is full")

    monkeypatch.setattr("ckpt8.integrations.transformers.compress", full)
    run = trainer(tmp_path / "warned", [Ckpt8Callback(keep_original=False)], max_steps=4)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-4: was not compressed: the disk is full"):
        run.train()
    assert names_in(tmp_path / "warned") == ["checkpoint-4"]
    for background in (False, True):
        run = trainer(tmp_path / "strict", [Ckpt8Callback(strict=True, background=background)], max_steps=4)
        with pytest.raises(OutputError, match="the disk is full"):
            run.train()


@pytest.mark.slow
def test_a_policy_goes_on_through_a_kill(tmp_path):
    options = {"keep_original": False, "keep": "last:2,every:4", "strict": True}
    stopped = trainer(tmp_path, [Ckpt8Callback(**options), StopAt(6)], save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert names_in(tmp_path) == [f"checkpoint-{step}.ckpt8" for step in (4, 5, 6)]
    run = trainer(tmp_path, [Ckpt8Callback(**options)], save_steps=1)
    with temporary_checkpoint(tmp_path) as path:
        assert path == str(tmp_path / "checkpoint-6")
        run.train(resume_from_checkpoint=path)
    left = {int(path.stem.partition("-")[2]): path for path in tmp_path.glob("*.ckpt8")}
    # What the run resumed from was beside its container, and young.
    assert set(left) == {4, 6, 8, LAST - 1, LAST}
    assert [record.step for record in ckpt8.runs(tmp_path)] == sorted(left)
    for path in left.values():
        assert ckpt8.verify(path).failures == ()


@pytest.mark.slow
def test_the_best_are_those_of_trainer_s_own_metric(tmp_path):
    """Its accuracy is best where its loss is not; what it calls the best stays beside that."""
    run = trainer(
        tmp_path, save_steps=2, eval_strategy="steps", eval_steps=2, metric_for_best_model="acc", greater_is_better=True
    )
    scores = dict(zip(range(2, LAST + 2, 2), [0.3, 0.9, 0.2, 0.8, 0.5, 0.1], strict=True))
    run.compute_metrics = lambda _: {"acc": scores[run.state.global_step]}
    run.train()
    assert run.state.best_metric == 0.9
    for path in sorted(tmp_path.glob("checkpoint-*")):
        age(path)
    plans = [ckpt8.thin(tmp_path, keep="best:2")]
    ckpt8.chain(tmp_path, delta=False, remove=True)
    plans.append(ckpt8.thin(tmp_path, keep="best:2"))
    for plan in plans:
        assert (plan.metric, plan.is_highest) == ("eval_acc", True)
        assert {record.step: record.score for record in plan} == scores
        assert {record.step for record in plan if record.becomes != "gone"} == {4, 8, LAST}
    (tmp_path / "checkpoint-4.ckpt8").rename(tmp_path / "checkpoint-4.moved")
    newest = ckpt8.thin(tmp_path, keep="best:1")
    assert {record.step for record in newest if record.becomes != "gone"} == {8, LAST}


def test_a_policy_that_is_none_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="is no rule"):
        Ckpt8Callback(keep="latest")
    with pytest.raises(UsageError, match="to much: expected a number of bytes"):
        Ckpt8Callback(to="much")
