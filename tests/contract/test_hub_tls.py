"""Fetching over TLS, and what else of an environment can stop a fetch: one clear line, the exit code, the way out.

Certificates are made by openssl for the test; the Hub is the loopback one behind TLS.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from ds41ctl.adapters import profiles
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.core.errors import ConfigError, NetworkError
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import HubSource
from ds41ctl.steps.fetch import Fetch
from tests.fakes.hub import REVISION, FakeHub
from tests.fakes.packs import layout_for

CONTENT = {"config.json": b"{}", "model-00001-of-00001.safetensors": b"w" * 200_000}
LIMITS = Limits(connect_s=5, stall_s=5, attempts=2, backoff_s=0.01)
LOOPBACK = "IP:127.0.0.1,DNS:localhost"


def openssl(*args: str) -> None:
    subprocess.run(["openssl", *args], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private CA, three certificates of it and one that signed itself: ca, good, wrong, expired, lonely."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl makes the certificates")
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name, more in (("ca", ()), ("lonely", ("-addext", f"subjectAltName={LOOPBACK}"))):
        openssl("req", "-x509", *key, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem", "-days", "2",
                "-subj", f"/CN={name}", *more)  # fmt: skip
    for name, names, days in (("good", LOOPBACK, 2), ("wrong", "DNS:other.example", 2), ("expired", LOOPBACK, 0)):
        openssl("req", *key, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.csr", "-subj", f"/CN={name}",
                "-addext", f"subjectAltName={names}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{folder}/{name}.csr", "-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key",
                "-copy_extensions", "copy", "-days", str(days), "-out", f"{folder}/{name}.pem")  # fmt: skip
    return folder


def served(certificates: Path, name: str) -> FakeHub:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    hub = FakeHub(tls=context)
    hub.add("owner/pack", CONTENT)
    return hub


def layout_of(tmp_path: Path) -> Layout:
    base = profiles.read(profiles.find("cpu-tiny"))
    model = base.model.model_copy(update={"sources": (HubSource(repo="owner/pack", revision=REVISION),)})
    return layout_for(base.model_copy(update={"model": model, "name": "tls"}), tmp_path)


def fetch(layout: Layout, url: str) -> None:
    Fetch(layout, hub=lambda: Hub(url, None, False, False, LIMITS)).do(lambda text, data: None)


def test_a_private_ca_of_ssl_cert_file_is_believed(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    layout = layout_of(tmp_path)
    with served(certificates, "good") as hub:
        fetch(layout, hub.url)
    assert all((layout.model_dir / name).read_bytes() == data for name, data in CONTENT.items())


@pytest.mark.parametrize(
    ("name", "ca", "why", "hint"),
    [
        ("good", "", "unable to get local issuer certificate", "export SSL_CERT_FILE="),
        ("lonely", "ca", "self-signed certificate", "export SSL_CERT_FILE="),
        ("wrong", "ca", "not valid for '127.0.0.1'", "HF_ENDPOINT"),
        ("expired", "ca", "certificate has expired", "date"),
    ],
)
def test_a_certificate_that_is_not_to_be_believed_is_one_line_at_once(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch, name: str, ca: str, why: str, hint: str
) -> None:
    if ca:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / f"{ca}.pem"))
    layout = layout_of(tmp_path)
    with served(certificates, name) as hub, pytest.raises(NetworkError) as caught:
        fetch(layout, hub.url)
    message = caught.value.message
    assert why.replace("-", " ") in message.replace("-", " ") and "certificate is not accepted" in message
    assert "\n" not in message and "_ssl.c" not in message and hint in caught.value.hints[0]
    assert hub.log == [], "nothing was said to a server that is not who it should be, and nothing was tried again"


def test_the_store_that_the_hub_redirects_to_is_judged_as_well(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    with served(certificates, "good") as hub, served(certificates, "lonely") as store:
        hub.cdn = store.cdn
        with pytest.raises(NetworkError, match=r"localhost:\d+: its certificate is not accepted: self"):
            fetch(layout_of(tmp_path), hub.url)
        assert store.log == []


def test_a_server_without_tls_is_said(tmp_path: Path) -> None:
    with FakeHub() as hub, pytest.raises(NetworkError, match="no TLS connection") as caught:
        fetch(layout_of(tmp_path), hub.url.replace("http:", "https:"))
    assert "https or http" in caught.value.hints[0]


@pytest.mark.parametrize("what", ["missing", "a folder", "no certificate"])
def test_a_ca_file_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = tmp_path / "ca.pem"
    if what == "a folder":
        path.mkdir()
    elif what == "no certificate":
        path.write_text("hello")
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with FakeHub() as hub, pytest.raises(ConfigError, match=f"SSL_CERT_FILE={path}: no CA certificates there"):
        fetch(layout_of(tmp_path), hub.url)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "foo://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with FakeHub() as hub, pytest.raises(ConfigError, match=f"{proxy}.* cannot be used"):
        fetch(layout_of(tmp_path), hub.url)


def test_a_dead_proxy_is_named_in_the_hint_and_every_wait_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    told: list[str] = []
    step = Fetch(layout_of(tmp_path), hub=lambda: Hub("http://127.0.0.1:8", None, False, False, LIMITS))
    with pytest.raises(NetworkError, match="cannot be reached") as caught:
        step.do(lambda text, data: told.append(text))
    assert "_proxy" in caught.value.hints[0] and any("attempt 2 of 2 in" in text for text in told)


@pytest.mark.parametrize("endpoint", ["foo", "ftp://x", "https://", "http://h:99999", "http://[::1", "http://a b"])
def test_an_endpoint_that_is_no_web_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ConfigError) as caught:
        Hub.of_environment()
    assert caught.value.message.startswith(f"HF_ENDPOINT={endpoint}: expected")


def test_a_password_in_the_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@mirror.example/hf")
    assert Hub.of_environment().name == "mirror.example"


@pytest.mark.parametrize("token", ["hf_abc def", "hf_t\u00f6ken"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match="token") as caught:
        Hub.of_environment()
    assert token not in str(caught.value) + str(caught.value.hints)


def test_a_time_out_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="HF_HUB_ETAG_TIMEOUT=soon: expected a whole number"):
        Hub.of_environment()
