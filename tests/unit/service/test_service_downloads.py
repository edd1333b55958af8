from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.service import own
from slipstream.service.errors import ApiError


@pytest.mark.parametrize("answer", [own.log, own.report_csv])
def test_a_file_that_is_deleted_while_it_is_asked_for_is_not_found(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "_file", lambda call, name: tmp_path / name)  # gone since the look
    with pytest.raises(ApiError) as refused:
        answer(SimpleNamespace(query_params={}))
    assert refused.value.body.code == 404
