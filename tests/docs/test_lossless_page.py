import runpy
from pathlib import Path


def test_the_page_says_what_the_code_does():
    made = runpy.run_path(str(Path(__file__).with_name("make_lossless.py")))
    assert made["PAGE"].read_text() == made["page"](), "run `.venv/bin/python -P tests/docs/make_lossless.py`"
