"""Remote files: a real HTTP server and a real S3 server on this machine."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from support.forms import shard
from unisono.data.source.files import expand
from unisono.data.source.raw import parse
from unisono.data.source.read import read_records
from unisono.errors import DataError, TransferError

RECORDS: list[dict[str, object]] = [{"text": f"{i} " + "x" * i} for i in range(300)]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; some names are answered badly."""

    def do_GET(self) -> None:
        if "short" in self.path or "dynamic" in self.path:
            self.send_response(200)
            if "short" in self.path:
                self.send_header("Content-Length", str(len(LINES)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(LINES[:-5000] if "short" in self.path else LINES)
        elif "secret" in self.path:
            self.send_error(403)
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        if any(word in self.path for word in ("short", "secret", "dynamic")):
            self.do_GET()
        else:
            super().do_HEAD()

    def log_message(self, format: str, *args: object) -> None:
        pass


@functools.cache
def contents() -> dict[str, bytes]:
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS), table)
    return {
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.tar": shard(RECORDS),
        "a.parquet": table.getvalue(),
        "a.json": json.dumps(RECORDS).encode(),
        "b.jsonl": LINES,
    }


NAMES = ["a.jsonl", "a.jsonl.gz", "a.tar", "a.parquet", "a.json"]


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("web")
    for name, content in contents().items():
        (folder / name).write_bytes(content)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    import boto3

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        for name, content in contents().items():
            client.put_object(Bucket="data", Key=f"in/{name}", Body=content)
        yield "s3://data/in"
    server.stop()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["web", "bucket"])
def test_remote_files_are_read_once(place: str, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"{request.getfixturevalue(place)}/{name}"
    (file,) = expand([url])
    digest = hashlib.sha256()
    raws = [parse(raw) for raw in read_records(file, digest, scratch=tmp_path)]
    assert [raw.value for raw in raws] == RECORDS
    assert digest.hexdigest() == hashlib.sha256(contents()[name]).hexdigest()
    assert file.num_bytes is not None and 0.9 * file.num_bytes < raws[-1].end_bytes <= file.num_bytes
    assert not list(tmp_path.iterdir())
    stamp = file.stamp()
    assert stamp is not None and url in stamp and file.stamp() == stamp


def test_patterns_and_braces_of_a_bucket(bucket: str) -> None:
    assert [file.name for file in expand([f"{bucket}/*.jsonl"])] == [f"{bucket}/a.jsonl", f"{bucket}/b.jsonl"]
    assert [file.name for file in expand([f"{bucket}/{{b,a}}.jsonl"])] == [f"{bucket}/b.jsonl", f"{bucket}/a.jsonl"]
    with pytest.raises(DataError, match=r"\*.csv: no file matches"):
        expand([f"{bucket}/*.csv"])


def test_a_pattern_of_a_server_that_lists_its_files(web: str) -> None:
    assert [file.name for file in expand([f"{web}/*.jsonl"])] == [f"{web}/a.jsonl", f"{web}/b.jsonl"]


def test_a_changed_object_has_another_stamp(bucket: str) -> None:
    import boto3

    boto3.client("s3").put_object(Bucket="data", Key="in/c.jsonl", Body=b"{}\n")
    (file,) = expand([f"{bucket}/c.jsonl"])
    stamp = file.stamp()
    boto3.client("s3").put_object(Bucket="data", Key="in/c.jsonl", Body=b"[]\n")
    assert file.stamp() != stamp
    boto3.client("s3").delete_object(Bucket="data", Key="in/c.jsonl")


def test_what_is_not_there_is_told_with_its_address(web: str, bucket: str) -> None:
    with pytest.raises(DataError) as caught:
        expand([f"{web}/no.jsonl", f"{bucket}/no.jsonl", "s3://nobucket/x.jsonl", f"{web}/secret.jsonl"])
    told = str(caught.value)
    assert f"{web}/no.jsonl: the file does not exist" in told
    assert f"{bucket}/no.jsonl: the file does not exist" in told and "AWS_ACCESS_KEY_ID" in told
    assert "s3://nobucket/x.jsonl: the file does not exist" in told
    assert f"{web}/secret.jsonl: the server gives no permission" in told


def test_a_refused_connection_is_told() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        DataError, match=rf"http://127.0.0.1:{port}/a.jsonl: cannot be read: [\s\S]*hint: check the addr"
    ):
        expand([f"http://127.0.0.1:{port}/a.jsonl"])


@pytest.mark.parametrize("name", ["short.jsonl", "short.json"])
def test_a_short_answer_is_no_short_file(web: str, name: str) -> None:
    (file,) = expand([f"{web}/{name}"])
    with pytest.raises(TransferError, match=rf"{web}/{name}: the server (closed the connection early|said that)"):
        list(read_records(file))


def test_an_answer_of_unknown_size_is_read(web: str) -> None:
    (file,) = expand([f"{web}/dynamic.jsonl"])
    assert file.num_bytes is None and file.stamp() is None
    assert len(list(read_records(file))) == 300


def test_a_remote_file_that_changes_has_another_version_and_sketch(bucket: str) -> None:
    import boto3

    client = boto3.client("s3")
    client.put_object(Bucket="data", Key="in/d.jsonl", Body=b"{}\n")
    (file,) = expand([f"{bucket}/d.jsonl"])
    assert file.first_version() == file.version() is not None
    client.put_object(Bucket="data", Key="in/d.jsonl", Body=b"[]\n")
    (again,) = expand([f"{bucket}/d.jsonl"])
    assert file.first_version() != file.version() and file.sketch() != again.sketch()
    client.delete_object(Bucket="data", Key="in/d.jsonl")
