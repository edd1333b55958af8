"""The real Python SDK drives the whole life cycle."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from ibm_cloud_sdk_core import ApiException
from ibm_cloud_sdk_core.authenticators import (
    BasicAuthenticator,
    BearerTokenAuthenticator,
    IAMAuthenticator,
    NoAuthAuthenticator,
)
from service_process import CSV, ServiceProcess, environment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ibm_watson import NaturalLanguageClassifierV1

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # the SDK warns that IBM's service has ended
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data") as service:
        yield service


def client(service: ServiceProcess, authenticator, prefix: str = "") -> NaturalLanguageClassifierV1:
    made = NaturalLanguageClassifierV1(authenticator=authenticator)
    made.set_service_url(service.url + prefix)
    return made


def life_cycle(made: NaturalLanguageClassifierV1, service: ServiceProcess, data, prefix="") -> None:
    metadata = json.dumps({"name": "Wetter ü", "language": "en"})
    created = made.create_classifier(training_metadata=metadata, training_data=data)
    assert created.get_status_code() == 200
    assert len(created.get_headers()["X-Global-Transaction-Id"]) == 32
    classifier = created.get_result()
    assert set(classifier) == {
        "classifier_id",
        "url",
        "name",
        "language",
        "created",
        "status",
        "status_description",
    }
    number = classifier["classifier_id"]
    assert classifier["name"] == "Wetter ü"
    assert classifier["status"] == "Training"
    assert classifier["url"] == f"{service.url}{prefix}/v1/classifiers/{number}"
    listed = made.list_classifiers().get_result()["classifiers"]
    assert listed[0]["classifier_id"] == number
    service.wait_for(lambda: made.get_classifier(number).get_result()["status"] == "Available")
    answer = made.classify(number, "how hot ü").get_result()
    assert set(answer) == {"classifier_id", "url", "text", "top_class", "classes"}
    assert answer["text"] == "how hot ü"
    assert {one["class_name"] for one in answer["classes"]} == {"temperature", "conditions"}
    assert sum(one["confidence"] for one in answer["classes"]) == pytest.approx(1)
    assert answer["top_class"] == answer["classes"][0]["class_name"]
    answers = made.classify_collection(number, [{"text": "rain"}, {"text": "hot"}]).get_result()
    assert [one["text"] for one in answers["collection"]] == ["rain", "hot"]
    assert set(answers["collection"][0]) == {"text", "top_class", "classes"}
    assert made.delete_classifier(number).get_result() == {}
    with pytest.raises(ApiException) as refused:
        made.get_classifier(number)
    assert (refused.value.code, refused.value.message) == (404, "Not found")


@pytest.mark.parametrize("prefix", ["", "/instances/ab-1", "/natural-language-classifier/api"])
def test_no_auth_from_every_base_url(service: ServiceProcess, prefix: str) -> None:
    life_cycle(client(service, NoAuthAuthenticator(), prefix), service, io.StringIO(CSV), prefix)


@pytest.mark.parametrize("form", ["string", "bytes", "file"])
def test_every_form_of_data(service: ServiceProcess, form: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(CSV)
    with path.open("rb") as file:
        data = {"string": CSV, "bytes": io.BytesIO(CSV.encode()), "file": file}[form]
        life_cycle(client(service, NoAuthAuthenticator()), service, data)


def test_gzip(service: ServiceProcess) -> None:
    made = client(service, NoAuthAuthenticator())
    made.set_enable_gzip_compression(True)
    life_cycle(made, service, CSV)


def test_errors_reach_the_user(service: ServiceProcess) -> None:
    made = client(service, NoAuthAuthenticator())
    with pytest.raises(ApiException) as refused:
        made.create_classifier(training_metadata="{}", training_data="a,b\n")
    assert refused.value.message == "Data too small"
    body = json.loads(refused.value.http_response.text)
    assert set(body) == {"code", "error", "description"}
    assert "received = 1" in body["description"]


def test_errors_of_large_bodies_reach_the_user(service: ServiceProcess) -> None:
    made = client(service, NoAuthAuthenticator(), "/nowhere")
    with pytest.raises(ApiException) as refused:
        made.create_classifier(training_metadata="{}", training_data="x" * (32 << 20))
    assert refused.value.message == "Not found"


def test_the_real_net(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", real=True) as service:
        made = client(service, NoAuthAuthenticator())
        life_cycle(made, service, CSV)
        assert "torch" not in service.process_maps()


def test_keys(tmp_path: Path) -> None:
    data = tmp_path / "data"

    def keys(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "slipstream",
            "keys",
            *arguments,
            "--data",
            str(data),
        ]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    key, other = keys("add", "team"), keys("add", "others")
    with ServiceProcess(data) as service:
        iam = IAMAuthenticator(key, url=service.url)
        for authenticator in (
            BasicAuthenticator("apikey", key),
            BearerTokenAuthenticator(key),
            iam,
        ):
            life_cycle(client(service, authenticator), service, CSV)
        mine = client(service, iam)
        created = mine.create_classifier(training_metadata="{}", training_data=CSV).get_result()
        with pytest.raises(ApiException) as hidden:
            client(service, BearerTokenAuthenticator(other)).get_classifier(
                created["classifier_id"]
            )
        assert hidden.value.code == 404
        for wrong in (
            NoAuthAuthenticator(),
            BasicAuthenticator("apikey", key + "x"),
            BearerTokenAuthenticator("a.b.c"),
        ):
            with pytest.raises(ApiException) as refused:
                client(service, wrong).list_classifiers()
            assert (refused.value.code, refused.value.message) == (401, "Unauthorized")
        with pytest.raises(ApiException) as unknown:
            client(service, IAMAuthenticator("sk_x", url=service.url)).list_classifiers()
        assert unknown.value.code == 400
        keys("revoke", key[:9])
        with pytest.raises(ApiException) as revoked:
            mine.list_classifiers()
        assert revoked.value.code == 401


def test_keys_that_are_none(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "keys",
        "add",
        "team",
        "--data",
        str(data),
    ]
    made = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    with ServiceProcess(data) as service:
        grant = "urn:ibm:params:oauth:grant-type:apikey"
        form = {"grant_type": grant, "apikey": made.stdout.strip()}
        token = requests.post(f"{service.url}/identity/token", data=form, timeout=60)
        head, claims, signature = token.json()["access_token"].split(".")

        def ask(credential: str) -> requests.Response:
            return service.get("/v1/classifiers", headers={"Authorization": credential})

        assert ask(f"Bearer {head}.{claims}.{signature}").status_code == 200
        none = base64.urlsafe_b64encode(b'{"alg": "none", "typ": "JWT"}').decode().rstrip("=")
        wrong = signature[:-2] + ("AA" if signature[-2:] != "AA" else "BB")
        for credential in (
            f"Bearer {none}.{claims}.",
            f"Bearer {none}.{claims}.{signature}",
            f"Bearer {head}.{claims}.{wrong}",
            "Basic %%%",
            "Basic /w==",
            "Bearer",
            "",
        ):
            answer = ask(credential)
            assert (answer.status_code, answer.json()["error"]) == (401, "Unauthorized")
            assert answer.headers["WWW-Authenticate"] == 'Basic realm="slipstream"'


def test_retries_get_through(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--rate", "10") as service:
        made = client(service, NoAuthAuthenticator())
        made.enable_retries(max_retries=10, retry_interval=1)
        while "GET '/v1/classifiers' 429" not in service.log.read_text():
            # 10 at once, then one in 6 s
            assert made.list_classifiers().get_result() == {"classifiers": []}
