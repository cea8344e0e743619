"""Write tests/data/torch: small state dicts as PyTorch, TorchRec and FBGEMM save them, and their numbers for NumPy.

Needs torch, torchrec and fbgemm-gpu-cpu of releases that go together; those there were written by 2.13, 1.8 and 1.8:

python tests/data/make_torch.py
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

FOLDER = Path(__file__).parent / "torch"
RANKS = 2
_WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)
TABLES = {"t_cat_0": (12, 4), "t_cat_1": (7, 8), "t_cat_2": (10, 16)}


class SparseArch(torch.nn.Module):
    """The tables, under the names that TorchRec's own models give them."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embedding_bag_collection = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                for name, (rows, dim) in TABLES.items()
            ],
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Pool the rows of all features."""
        return self.embedding_bag_collection(features).values()


class Model(torch.nn.Module):
    """Tables, and dense layers behind them."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.sparse_arch = SparseArch(device)
        self.over_arch = torch.nn.Linear(sum(dim for _, dim in TABLES.values()), 3)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return scores."""
        return self.over_arch(self.sparse_arch(features))


def _numbers(tensors: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor) and value.dtype not in _WITHOUT_NUMPY:
            found[prefix + str(name)] = value.detach().numpy()
    return found


def _features() -> KeyedJaggedTensor:
    keys = [f"f_{name}" for name in TABLES]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=keys, values=torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.tensor([1, 1, 1, 1, 1, 1])
    )


def _plain() -> None:
    """One process, plain PyTorch: the files that most models are saved in."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(_features()).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), FOLDER / "state_dict.pt")
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(training, FOLDER / "training.pt")
    torch.save(model.state_dict(), FOLDER / "before_1_6.pt", _use_new_zipfile_serialization=False)
    torch.save(model, FOLDER / "whole_model.pt")
    np.savez(FOLDER / "training.npz", **_numbers(training))
    matrix = torch.arange(24.0).reshape(6, 4)
    odd = {
        "emb.bfloat16": matrix.to(torch.bfloat16),
        "emb.float16": matrix.half(),
        "emb.float64": matrix.double(),
        "emb.int8": matrix.to(torch.int8),
        "emb.rows": matrix[2:5],
        "emb.columns": matrix[:, 1:3],
        "emb.transposed": matrix.T,
        "emb.same": matrix,
        "emb.parameter": torch.nn.Parameter(matrix),
        "emb.empty": torch.zeros(0, 4),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "uint32": torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
        "uint64": torch.tensor([1, 2**63], dtype=torch.uint64),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "mask": matrix > 3,
        "complex": torch.complex(matrix, matrix),
        "step": torch.tensor(7),
        "size": matrix.shape,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    torch.save(odd, FOLDER / "odd.pt")
    np.savez(FOLDER / "odd.npz", **_numbers(odd))
    torch.serialization.set_crc32_options(False)
    torch.save({"emb.weight": matrix}, FOLDER / "without_checksums.pt")
    torch.serialization.set_crc32_options(True)


def _fbgemm() -> None:
    """What a table-batched operator of FBGEMM saves by itself: all tables in one flat tensor."""
    torch.manual_seed(1)
    operator = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in TABLES.values()],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        device=torch.device("cpu"),
    )
    for weights in operator.split_embedding_weights():
        weights.uniform_(-1, 1)
    operator(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])).sum().backward()
    torch.save(operator.state_dict(), FOLDER / "fbgemm.pt")
    numbers = {f"{i}.weight": weights for i, weights in enumerate(operator.split_embedding_weights())}
    for i, state in enumerate(operator.split_optimizer_states()):
        numbers |= {f"{i}.{n}": value for n, value in enumerate(state)}
    np.savez(FOLDER / "fbgemm.npz", **_numbers(numbers))


def _sharded(rank: int, folder: str) -> None:
    """One of the ranks of a TorchRec model whose tables are sharded by rows, tables and columns."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    model = Model("meta")
    sharders = [
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
        )
    ]
    tables = construct_module_sharding_plan(
        model.sparse_arch.embedding_bag_collection,
        {
            "t_cat_0": row_wise(compute_kernel="fused"),
            "t_cat_1": table_wise(rank=1, compute_kernel="fused"),
            "t_cat_2": column_wise(ranks=[0, 1], compute_kernel="fused"),
        },
        sharders[0],
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )
    plan = ShardingPlan({"sparse_arch.embedding_bag_collection": tables})
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    for _ in range(2):
        parallel(_features()).sum().backward()
    state = {"model": parallel.state_dict(), "optimizer": parallel.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/sharded")
    if rank == 0:
        torch.save(parallel.state_dict(), FOLDER / "sharded_tensors.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Write the files."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    _plain()
    _fbgemm()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sharded, (folder,), RANKS)
        shutil.copytree(f"{folder}/sharded", FOLDER / "sharded")
        dcp_to_torch_save(f"{folder}/sharded", f"{folder}/whole.pt")
        whole = torch.load(f"{folder}/whole.pt", weights_only=False)
        np.savez(FOLDER / "sharded.npz", **_numbers(whole))


if __name__ == "__main__":
    sys.exit(main())
