"""The device path: which chunks take it, in what order copies run, and that its files are those of the CPU.

Without a GPU a stand-in plays the device: its memory is the CPU's, and its copies run as late as they may.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from resume_kit import same

import ckpt8
from ckpt8.compressing import device_encoder, lockstep
from ckpt8.container.reader import ContainerReader
from ckpt8.core import backend
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.gpu import copy_to_row, requested, row_bytes, row_views
from ckpt8.core.workers import Buffers
from ckpt8.integrations.dcp import Ckpt8StorageWriter
from ckpt8.restoring.resume import resume as run
from ckpt8.restoring.resume.new_state import DeviceCopy

PRESETS = ("flash", "compact", "archive", "lossless")
CASES = [
    *((preset, {}) for preset in PRESETS),
    ("compact", {"max_update_error": 1e-9}),
    ("flash", {"threads": 3, "stats": False}),
]


class Deferred:
    """A Transfer whose copies run when somebody waits for them, and not before."""

    kind = "cpu"
    made: list[Deferred]
    marks: dict[int, list[Later]]

    def __init__(self, device):
        self.device = device
        self.buffers = self.downloads = self.uploads = self.uploaded = 0
        Deferred.made.append(self)

    def pinned(self, nbytes):
        self.buffers += 1
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def active(self):
        return nullcontext()

    def download(self, parts, row):
        self.downloads += 1
        assert row_bytes(parts) <= len(row)
        return row_views(parts, row), self._later(row, partial(copy_to_row, parts, row))

    def upload(self, row):
        self.uploads += 1
        self.uploaded += len(row)
        there = torch.full_like(row, 0x5A)
        return there, self._later(row, partial(there.copy_, row))

    def receive(self, row, mark):
        mark.run()

    def _later(self, row, action):
        Deferred.marks.setdefault(row.data_ptr(), []).append(mark := Later(action))
        return mark


class Later:
    """``run`` is what the device does in its own time; only ``synchronize`` tells the host that it has."""

    def __init__(self, action):
        self._lock = threading.Lock()
        self._actions = deque([action])
        self.known = False

    def run(self):
        with self._lock:
            while self._actions:
                self._actions.popleft()()

    def synchronize(self):
        self.run()
        self.known = True


@pytest.fixture
def stand_in(monkeypatch):
    """Everything on the CPU counts as being on a GPU; the devices that were opened."""
    Deferred.made, Deferred.marks = [], {}
    # The last digits of sums follow the engine and its tiles: a device has torch's, of whole chunks.
    monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", 1 << 60)
    monkeypatch.setattr(lockstep, "TILE", 1 << 20)
    give = Buffers.give

    def give_back(self, buffer):
        assert all(mark.known for mark in Deferred.marks.pop(buffer.data_ptr(), []))
        give(self, buffer)

    monkeypatch.setattr(Buffers, "give", give_back)
    monkeypatch.setattr(device_encoder, "CudaTransfer", Deferred)
    monkeypatch.setattr(
        "ckpt8.compressing.compress.requested", lambda device: torch.device("cpu") if device == "cuda" else None
    )
    monkeypatch.setattr(run, "DeviceCopy", partial(DeviceCopy, make=Deferred))
    return Deferred.made


def checkpoint(device="cpu"):
    """A weight and its moments of several chunks, a weight that is refused at its end, small and odd things."""
    torch.manual_seed(0)
    weights = torch.randn(1100, 1000)
    late = torch.randn(1_100_000)
    states = [
        {"exp_avg": x * 1e-3, "exp_avg_sq": x.square() * 1e-6 * torch.rand(len(x), *[1] * (x.dim() - 1))}
        for x in (weights, late)
    ]
    late[-1] = float("nan")
    tree = {
        "model": {
            "w": weights,
            "late": late,
            "t": torch.randn(300, 200).t(),
            "half": torch.randn(5000).bfloat16(),
            "n": torch.arange(7),
            "empty": torch.empty(0),
            "double": torch.randn(70, 70, dtype=torch.float64),
        },
        "optimizer": {
            "state": {k: {"step": torch.tensor(9.0)} | state for k, state in enumerate(states)},
            "param_groups": [{"params": [0, 1], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}],
        },
    }
    return torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def frames(path):
    """Codec and frames of every storage but the skeleton, by name."""
    with ContainerReader(path) as reader:
        storages = reader.manifest.storages[:-1]
        return {each.name: (each.codec, {k: (t.lengths, t.crcs) for k, t in each.parts.items()}) for each in storages}


@pytest.mark.by_default("flash-options0")
@pytest.mark.parametrize(("preset", "options"), CASES)
def test_live_tensors_of_a_device_give_the_file_of_the_cpu(preset, options, tmp_path, stand_in, monkeypatch):
    tree, target = checkpoint(), tmp_path / "a.ckpt8"
    with monkeypatch.context() as patch:
        patch.setattr(Deferred, "kind", "none")
        ckpt8.save(tree, target, preset=preset, **options)
    assert not stand_in
    expected = target.read_bytes()
    ckpt8.save(tree, target, preset=preset, **options)
    (device,) = stand_in
    assert device.downloads >= 10
    assert not device.uploads
    assert target.read_bytes() == expected
    pending = ckpt8.save(tree, target, preset=preset, background=True, **options)
    torch.utils._pytree.tree_map(lambda x: x.zero_() if isinstance(x, torch.Tensor) else x, tree)
    pending.result()
    assert target.read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "options"), CASES)
def test_a_file_packed_on_a_device_gives_the_file_of_the_cpu(preset, options, tmp_path, stand_in):
    source, target = tmp_path / "a.pt", tmp_path / "a.ckpt8"
    torch.save(checkpoint(), source)
    ckpt8.compress(source, target, preset=preset, **options)
    assert not stand_in
    expected = target.read_bytes()
    ckpt8.compress(source, target, preset=preset, device="cuda", force=True, **options)
    (device,) = stand_in
    # What is kept bit for bit has nothing to gain from the way there and back.
    assert device.uploads == device.downloads
    assert (device.uploads > 0) == (preset != "lossless")
    assert target.read_bytes() == expected


def moved(tree):
    """The checkpoint after what may be a step."""
    generator = torch.Generator().manual_seed(1)

    def move(x):
        is_number = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0
        return x * (1 + 1e-3 * torch.rand(x.shape, generator=generator, dtype=x.dtype)) if is_number else x

    return torch.utils._pytree.tree_map(move, tree)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_delta_packed_on_a_device_is_that_of_the_cpu(preset, tmp_path, stand_in, monkeypatch):
    base, source, target = tmp_path / "base.ckpt8", tmp_path / "a.pt", tmp_path / "a.ckpt8"
    with monkeypatch.context() as patch:
        patch.setattr(Deferred, "kind", "none")
        ckpt8.save(checkpoint(), base, preset=preset)
    tree = moved(checkpoint())
    torch.save(tree, source)
    manifest = ckpt8.compress(source, target, preset=preset, base=base)
    assert not stand_in
    chosen = {each.name: each.base is not None for each in manifest.storages}
    assert chosen["model.w"]
    assert chosen["model.late"] == (preset == "lossless")
    expected = target.read_bytes()
    ckpt8.compress(source, target, preset=preset, base=base, device="cuda", force=True)
    assert stand_in
    assert target.read_bytes() == expected
    live = tmp_path / "live.ckpt8"
    ckpt8.save(tree, live, preset=preset, base=base)
    assert {name: found[1] for name, found in frames(live).items()} == {
        name: found[1] for name, found in frames(target).items()
    }


@pytest.mark.slow
def test_checksums_of_the_source_are_checked_on_the_way_to_a_device(tmp_path, stand_in):
    source = tmp_path / "a.pt"
    weights = torch.randn(200, 200)
    torch.save({"model": {"w": weights}}, source)
    content = source.read_bytes()
    place = content.index(bytes(weights.untyped_storage())) + 5
    source.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(InputError, match=r"model\.w: checksum"):
        ckpt8.compress(source, device="cuda")
    assert stand_in[0].uploads
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.slow
def test_buffers_are_used_again(tmp_path, stand_in):
    tree = {"model": {"w": torch.randn(20 << 20)}}
    ckpt8.save(tree, tmp_path / "a.ckpt8", threads=1, stats=False)
    (device,) = stand_in
    assert device.downloads >= 20
    # Those that wait for a worker, the one that it has, and the one that is being filled.
    assert device.buffers <= 5
    torch.save(tree, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt", device="cuda", threads=1, stats=False, force=True)
    assert stand_in[1].uploads == 20
    assert stand_in[1].buffers <= 9


def test_a_pool_gives_the_smallest_buffer_that_fits():
    made = []
    pool = Buffers(lambda nbytes: made.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8))
    large, small = pool.take(5 << 20), pool.take(0)
    assert made == [8 << 20, 1 << 20]
    pool.give(large)
    pool.give(small)
    assert pool.take(1 << 20) is small
    assert pool.take(1 << 20) is large
    pool.take(1)
    assert len(made) == 3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["save", "compress", "background"])
def test_what_does_not_fit_into_the_device_is_packed_on_the_cpu(way, tmp_path, stand_in, monkeypatch):
    target = tmp_path / "a.ckpt8"
    torch.save(checkpoint(), tmp_path / "a.pt")
    options = {"background": True, "snapshot": "packed"} if way == "background" else {}

    def write():
        if way == "compress":
            return ckpt8.compress(tmp_path / "a.pt", target, preset="archive", device="cuda", force=True)
        done = ckpt8.save(checkpoint(), target, preset="archive", **options)
        return done.result() if options else done

    write()
    expected = target.read_bytes()
    pack, calls = device_encoder.DeviceEncoder.pack_tensors, []

    def scarce(self, work, originals, crcs):
        if threading.current_thread() is threading.main_thread():
            calls.append(work)
            if len(calls) % 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return pack(self, work, originals, crcs)

    monkeypatch.setattr(device_encoder.DeviceEncoder, "pack_tensors", scarce)
    upload = Deferred.upload
    monkeypatch.setattr(Deferred, "upload", lambda self, row: full() if self.uploads == 3 else upload(self, row))

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    write()
    assert len(calls) > 2
    assert target.read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["flash", "archive"])
def test_units_on_several_devices_are_left_to_the_cpu(preset, tmp_path, stand_in):
    """As they are where only one of a parameter's moments was moved."""
    tree, target = checkpoint(), tmp_path / "a.ckpt8"
    ckpt8.save(tree, target, preset=preset)
    expected, launched = target.read_bytes(), stand_in[0].downloads
    choose = device_encoder.LiveEncoder.__init__

    def without_one(self, whole, live, **options):
        moment = tree["optimizer"]["state"][0]["exp_avg"].untyped_storage()
        some = {key: storage for key, storage in live.items() if storage.data_ptr() != moment.data_ptr()}
        choose(self, whole, some, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_encoder.LiveEncoder, "__init__", without_one)
        ckpt8.save(tree, target, preset=preset)
    assert target.read_bytes() == expected
    # Two chunks of moments, under a budget with their weights; the skeleton is never on a device.
    assert stand_in[1].downloads == launched - 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["flash", "lossless"])
def test_what_a_distributed_save_makes_when_it_is_read_is_no_memory_of_a_device(
    preset, tmp_path, stand_in, monkeypatch
):
    tree = checkpoint()
    tree["master"] = {"w": tree["model"]["w"].t(), "t": torch.randn(300, 200).t()}
    tree["model"]["copy"] = tree["master"]["w"].bfloat16().contiguous()
    tree["model"]["u"] = tree["master"]["t"].bfloat16().contiguous()
    del tree["model"]["w"]
    tree["optimizer"]["state"][1]["exp_avg"] = torch.randn(1_100_000, 2)[:, 0]

    def save(name):
        writer = Ckpt8StorageWriter(tmp_path / name, preset=preset)
        torch.distributed.checkpoint.save(tree, storage_writer=writer, no_dist=True)
        return (tmp_path / name / "__0_0.ckpt8").read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(Deferred, "kind", "none")
        expected = save("cpu")
    assert not stand_in
    assert save("device") == expected
    assert stand_in[0].downloads


def came(parameters):
    return pytest.importorskip("came_pytorch").CAME(parameters, lr=1e-4)


@pytest.mark.by_default("flash-AdamW")
@pytest.mark.parametrize(
    ("preset", "optimizer_of"), [*((preset, torch.optim.AdamW) for preset in PRESETS), ("archive", came)]
)
def test_resume_uploads_parts_and_decodes_them_there(preset, optimizer_of, tmp_path, stand_in, monkeypatch):
    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(1200, 1000), torch.nn.Conv2d(70, 70, 3), torch.nn.Linear(9, 9))
        model[1].to(memory_format=torch.channels_last)
        return model, optimizer_of(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path = tmp_path / "run.ckpt8"
    with monkeypatch.context() as patch:
        patch.setattr(Deferred, "kind", "none")
        ckpt8.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path, preset=preset)
        expected = make()
        ckpt8.resume(path, *expected)
    found = make()
    ckpt8.resume(path, *found)
    assert bool(stand_in) == (preset != "lossless")
    with ContainerReader(path) as reader:
        records = enumerate(reader.manifest.storages)
        stored = [record.numel for index, record in records if reader.codec(index).measured_as is not None]
    if stand_in:
        # Per weight and moment of the linear layer two chunks; the rest fits into one, where it is contiguous.
        assert sum(device.uploads for device in stand_in) >= (6 if optimizer_of is torch.optim.AdamW else 4)
        # Two of each of three sizes.
        assert all(device.buffers <= 6 for device in stand_in)
        # Packed symbols: less than the values, although second moments go there twice.
        assert sum(device.uploaded for device in stand_in) < 4 * sum(stored)
    for mine, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert same(found[1].state_dict()["state"], expected[1].state_dict()["state"])


def test_an_unknown_device_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    for device in ("tpu", "cuda:99", ""):
        with pytest.raises(UsageError, match="expected one of auto, cpu, cuda"):
            ckpt8.compress(tmp_path / "a.pt", device=device)
    assert requested("auto") is requested("cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="finds no CUDA device"):
        ckpt8.compress(tmp_path / "a.pt", device="cuda")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


# A GPU


def gpu(test):
    """A test that needs a CUDA device."""
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needed(test))


@gpu
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_gpu_tensors_give_the_parts_of_cpu_tensors(preset, background, tmp_path):
    there, here = checkpoint("cuda"), checkpoint()
    ckpt8.save(here, tmp_path / "a.ckpt8", preset=preset)
    pending = ckpt8.save(there, tmp_path / "b.ckpt8", preset=preset, background=background)
    if background:
        torch.utils._pytree.tree_map(lambda x: x.zero_() if isinstance(x, torch.Tensor) else x, there)
        pending.result()
    assert frames(tmp_path / "b.ckpt8") == frames(tmp_path / "a.ckpt8")


@gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_packed_on_a_gpu_has_the_parts_and_figures_of_the_cpu(preset, tmp_path):
    source = tmp_path / "a.pt"
    torch.save(checkpoint(), source)
    ckpt8.compress(source, tmp_path / "a.ckpt8", preset=preset)
    ckpt8.compress(source, tmp_path / "b.ckpt8", preset=preset, device="cuda")
    assert frames(tmp_path / "b.ckpt8") == frames(tmp_path / "a.ckpt8")
    assert ckpt8.verify(tmp_path / "b.ckpt8", source).failures == ()


@gpu
def test_what_is_queued_on_any_stream_of_the_caller_is_saved(tmp_path):
    x = torch.zeros(3 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.5)
        ckpt8.save({"model": {"w": x}}, tmp_path / "a.ckpt8")
    assert bool((ckpt8.load(tmp_path / "a.ckpt8", map_location="cpu")["model"]["w"] == 1.5).all())


@gpu
def test_a_budget_is_spent_on_what_is_queued(tmp_path):
    """Other threads take the samples that steps and salts follow from."""
    tree = checkpoint("cuda")
    first = tree["optimizer"]["state"][0]["exp_avg"]
    final = first.clone()
    first.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        first.copy_(final)
        ckpt8.save(tree, tmp_path / "a.ckpt8", preset="archive")
    ckpt8.save(checkpoint(), tmp_path / "b.ckpt8", preset="archive")
    assert frames(tmp_path / "a.ckpt8") == frames(tmp_path / "b.ckpt8")


@gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_resume_onto_a_gpu_gives_the_values_of_the_cpu(preset, tmp_path):
    def make(device):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(1200, 1900), torch.nn.Linear(70, 90)).to(device)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make("cpu")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ckpt8.save(tree, tmp_path / "run.ckpt8", preset=preset)
    here, there = make("cpu"), make("cuda")
    ckpt8.resume(tmp_path / "run.ckpt8", *here)
    ckpt8.resume(tmp_path / "run.ckpt8", *there)
    for mine, theirs in zip(here[0].parameters(), there[0].parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(here[1].state[mine][key], there[1].state[theirs][key].cpu())
