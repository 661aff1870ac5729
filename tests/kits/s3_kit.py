"""A bucket of the tests, on moto's server: what is in it, what the server saw, and what goes wrong there."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

BUCKET = "bucket"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
"""What every test sets: nothing of the machine counts, and no address but the loopback is asked."""


class Bucket:
    """A bucket and its server."""

    def __init__(self, endpoint):
        import boto3

        self.endpoint = endpoint
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, key, content):
        """Put a file or bytes there; the URL of the object. The log begins anew."""
        body = content.read_bytes() if isinstance(content, Path) else content
        self.client.put_object(Bucket=BUCKET, Key=key, Body=body)
        self.order()
        return f"s3://{BUCKET}/{key}"

    def order(self, *faults):
        """Have these faults happen, and no others; the log since the last call."""
        return self._control({"faults": faults})

    def look(self):
        """The log since the last call; faults stay as they are."""
        return self._control({})

    def _control(self, order):
        request = urllib.request.Request(f"{self.endpoint}/__control", data=json.dumps(order).encode())
        with urllib.request.urlopen(request) as answer:
            return [entry for entry in json.load(answer) if entry["path"].startswith(f"/{BUCKET}")]

    @contextmanager
    def counted(self):
        """A list that has the log of the block after it."""
        log = []
        self.order()
        yield log
        log += self.order()


@contextmanager
def running():
    """The address of a server, as long as the block runs."""
    program = Path(__file__).with_name("s3_server.py")
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(20)
