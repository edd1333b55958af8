"""Examples for ``/openapi.json`` and ``/docs``: bodies and answers by type, parameters by name."""

from __future__ import annotations

from typing import Any, Final

from slipstream.apps.service import own, v1
from slipstream.apps.service.errors import ErrorBody
from slipstream.apps.service.rows import Limits
from slipstream.apps.service.upload import Metadata, TrainingParts

ID: Final = "3f09c2x51c0a7e9d4-nlc-1"
URL: Final = f"http://127.0.0.1:8080/v1/classifiers/{ID}"
TEXT: Final = "a cheap room in Oslo"
CLASSES: Final = [v1.ClassifiedClass("hotel", 0.93), v1.ClassifiedClass("flight", 0.07)]
CREATED: Final = "2026-11-16T18:01:57.393Z"
CLASSIFIER: Final = v1.Classifier(
    classifier_id=ID,
    url=URL,
    name="trips",
    language="en",
    created=CREATED,
    status="Available",
    status_description="The classifier instance is now available and is ready to take classifier "
    "requests.",
)
JOB: Final = {
    "state": "running",
    "phase": "training",
    "phase_percent": 41,
    "resumed_epoch": None,
    "may_stop_early": True,
    "stops_early": None,
    "ahead": 0,
    "percent": 41,
    "epoch": 82,
    "epochs": 200,
    "updates": 5330,
    "samples_s": 410.5,
    "eta_s": 19,
    "attempt": 1,
    "version": 1,
    "rows": 128,
    "classes": 4,
    "cut": 0,
    "bytes": 4711,
    "started": 1_700_000_000_042,
    "finished": None,
    "error": None,
    "accuracy": None,
}
EXAMPLES: Final[dict[type, Any]] = {
    ErrorBody: ErrorBody(
        400, "Malformed data", "The 'class' value at line 11 and column 2 is 'null'."
    ),
    TrainingParts: TrainingParts(
        Metadata("trips", "en"), "a room for two nights,hotel\ntwo seats to Rome,flight\n"
    ),
    v1.Classifier: CLASSIFIER,
    v1.ClassifierList: v1.ClassifierList([CLASSIFIER]),
    v1.Phrase: v1.Phrase(TEXT),
    v1.PhraseCollection: v1.PhraseCollection([v1.Phrase(TEXT), v1.Phrase("a seat to Rome")]),
    v1.Classification: v1.Classification(ID, URL, TEXT, "hotel", CLASSES),
    v1.ClassificationCollection: v1.ClassificationCollection(
        ID, URL, [v1.CollectionItem(TEXT, "hotel", CLASSES)]
    ),
    v1.TokenForm: v1.TokenForm("urn:ibm:params:oauth:grant-type:apikey", "sk_…"),
    v1.Token: v1.Token(access_token="eyJhbGciOiJIUzI1NiJ9.…", expiration=1_700_003_600),
    own.JobState: JOB,
    own.Changed: own.Changed(2),
    own.Versions: own.Versions(
        [
            own.Version(2, 140, 4, 1_700_000_900_000, None, active=False, trained=False),
            own.Version(1, 128, 4, 1_700_000_000_042, 0.92, active=True, trained=True),
        ]
    ),
    Limits: Limits(),
}
PARAMETERS: Final = {  # what each is, and an example
    "id": ("The classifier's id: classifier_id of the answer to its upload.", ID),
    "number": ("The number of a version.", "1"),
    "text": ("The text to classify, percent-encoded.", TEXT),
    "all": ("`1`: the whole log.", "1"),
    "long": ("`cut`: texts that are too long are cut after a word, and counted.", "cut"),
    "Idempotency-Key": (
        "Any text of up to 128 visible ASCII characters. The same bytes sent again with it within "
        "24 hours make no second classifier.",
        "trips-2026-11-16",
    ),
    "Last-Event-ID": ("The last epoch that was seen: go on after it.", "82"),
}
TAGS: Final = {  # by the beginning of the path; the first that fits
    "/v1": (
        "Watson API",
        "IBM's Natural Language Classifier, so that its clients work unchanged.",
    ),
    "/identity": ("Watson API", ""),
    "/api": (
        "Own API",
        "What IBM's API does not have: progress, report, downloads, cancel, versions.",
    ),
    "/livez": ("Operation", "Health and metrics, for operators."),
    "/readyz": ("Operation", ""),
    "/metrics": ("Operation", ""),
    "": ("Pages", "For people; and this description."),
}


def tag_of(path: str) -> str:
    """The group of operations that a path belongs to.

    >>> tag_of("/v1/classifiers"), tag_of("/page.css")
    ('Watson API', 'Pages')
    """
    return next(tag for start, (tag, _) in TAGS.items() if path.startswith(start))
