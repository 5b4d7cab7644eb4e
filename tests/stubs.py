"""HTTP servers on this machine that stand for parts of a cloud that no test can have: STS, a node's role, S3."""

import datetime
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

ETAG = '"0123456789abcdef0123456789abcdef"'


class Asked(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: str


class Stub:
    """Answers each request as a function says: (status, body) or (status, body, headers)."""

    def __init__(self, answer: Callable[[Asked], tuple]) -> None:
        self.requests: list[Asked] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(headers.get("content-length", 0))).decode()
                asked = Asked(self.command, self.path, headers, body)
                stub.requests.append(asked)
                status, content, *more = answer(asked)
                content = content if isinstance(content, bytes) else content.encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(content), **(more[0] if more else {})}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Stub":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class TokenStore:
    """Answers as S3 does for one object, s3://bucket/d/x.bin, to those whose session tokens it knows."""

    def __init__(self, data: bytes) -> None:
        self.data, self.tokens = data, set()

    def __call__(self, asked: Asked) -> tuple:
        if "authorization" not in asked.headers:
            return 403, error("AccessDenied")
        if asked.headers.get("x-amz-security-token") not in self.tokens:
            return 400, error("ExpiredToken")
        if "list-type=2" in asked.path:
            entry = f"<Contents><Key>d/x.bin</Key><Size>{len(self.data)}</Size><ETag>{ETAG}</ETag></Contents>"
            return 200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entry}</ListBucketResult>"
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers["range"]).groups())
        headers = {"ETag": ETAG, "Content-Range": f"bytes {first}-{last}/{len(self.data)}"}
        return 206, self.data[first : last + 1], headers


def error(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>as the stub says</Message></Error>"


class TokenService:
    """Answers as STS does to AssumeRoleWithWebIdentity: a session named for the token that was shown."""

    def __init__(self) -> None:
        self.faults: list[tuple] = []
        self.seconds = 3600.0

    def __call__(self, asked: Asked) -> tuple:
        if self.faults:
            return self.faults.pop(0)
        given = {name: values[0] for name, values in parse_qs(asked.body).items()}
        assert given["Action"] == "AssumeRoleWithWebIdentity"
        until = _after(self.seconds)
        return 200, (
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            f"<AccessKeyId>AKIDOF{given['WebIdentityToken']}</AccessKeyId><SecretAccessKey>hush-hush</SecretAccessKey>"
            f"<SessionToken>session-of-{given['WebIdentityToken']}</SessionToken><Expiration>{until}</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )


def node_role(asked: Asked) -> tuple:
    """Answers as the metadata service of a node that has a role."""
    path = urlsplit(asked.path).path
    if path == "/latest/api/token":
        return 200, "metadata-token", {"x-aws-ec2-metadata-token-ttl-seconds": 21600}
    if path.endswith("/security-credentials/"):
        return 200, "role-of-the-node"
    keys = {"Code": "Success", "AccessKeyId": "AKIDOFNODE", "SecretAccessKey": "hush-node", "Token": "session-of-node"}
    return 200, json.dumps({**keys, "Expiration": _after(36000), "LastUpdated": _after(-60)})


def no_role(asked: Asked) -> tuple:
    """Answers as the metadata service of a node without one."""
    return (200, "metadata-token") if "api/token" in asked.path else (404, "")


def _after(seconds: float) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return (now + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
