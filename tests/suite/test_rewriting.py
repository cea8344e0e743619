"""What a worker keeps of a test file is what pytest's import of it finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from rewriting import keep_rewritten


def test_a_kept_file_is_imported_as_pytest_would_rewrite_it(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_of_one.py"
    file.write_text("def check(one):\n    assert one == 2\n")
    keep_rewritten(file, request.config)
    keep_rewritten(file, request.config)
    monkeypatch.setattr(rewrite, "_rewrite_test", lambda *_: pytest.fail("rewritten again"))
    hook = rewrite.AssertionRewritingHook(request.config)
    spec = importlib.util.spec_from_file_location("test_of_one", file, loader=hook)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    hook.exec_module(module)
    with pytest.raises(AssertionError, match="1 == 2"):
        module.check(1)
