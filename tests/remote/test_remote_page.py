"""The commands of docs/remote.md run as they stand there, against an S3 server, and its Python prints what it shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chain_writer import ChainWriter
from page_blocks import blocks, commands
from s3_bucket import Bucket

from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.migrate import write_tables

PAGE = "docs/remote.md"


def test_the_page_runs(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("models", "serving"):
        bucket.client.create_bucket(Bucket=name)
    table = ArrayTable("user_emb", np.arange(50), np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32))
    write_tables([table], tmp_path / "model.ckpt-100", "tfplugin")
    chain = ChainWriter(tmp_path / "train", {"user_emb": 3})
    chain.put("user_emb", range(20), 1.0)
    chain.full()
    chain.put("user_emb", range(10, 30), 2.0)
    chain.increment()
    models = Bucket("models", bucket.proxy, bucket.client)
    models.put(tmp_path / "train", "train")
    for file in tmp_path.glob("model.ckpt-100.*"):
        models.put(file, file.name)
    ran = 0
    for block in blocks(PAGE):
        for command in commands(block) if block.language == "console" else []:
            if command.arguments[1] != "serve":  # which goes on until it is ended
                status = main(command.arguments[1:])
                assert status in (0, 3), (command.text, capsys.readouterr().err)
                ran += 1
        if block.language == "python":
            capsys.readouterr()
            exec(compile("\n" * (block.line - 1) + block.text, PAGE, "exec"), {"__name__": PAGE})
            assert f"# {capsys.readouterr().out.strip()}" in block.text
    assert ran >= 6
