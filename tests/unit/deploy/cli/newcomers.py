"""Mistakes of newcomers: what they type, and the sentence that names the fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAKEN, FREE, SECRET, MODELS, FOLDER = "{taken}", "{free}", "{secret}", "{models}", "{folder}"
"""They stand for a port that somebody listens on, one of nobody, a file with a cluster's secret, the folder of
`broken_models` and the folder where the command runs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    words: str
    """The command, after `baton`."""
    sentence: str
    """What the only line of the error has to hold."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, without their `BATON_`, in lower case."""
    needs_model: bool = False
    """Whether it is found in the default model's folder."""
    status: int = 1


MISTAKES = {
    "a command of another server": Mistake(words="serve", sentence="Did you mean 'up'?", status=2),
    "a command that nobody has": Mistake(words="xyz", sentence="see `baton --help`", status=2),
    "a command's letter": Mistake(words="statsu", sentence="Did you mean 'status'?", status=2),
    "an option's letter": Mistake(words="up --prefil 2", sentence="did you mean --prefill?", status=2),
    "a negative size": Mistake(words="scale decode -1", sentence="numbers must be 0 or more", status=2),
    "a missing prompt": Mistake(words="generate", sentence="see `baton generate --help`", status=2),
    "a part that is none": Mistake(words="run worker", sentence="Ray starts the workers, on any node with room"),
    "a variable's letter": Mistake(
        words="up", settings={"engine_kv_cache_gb": "3"}, sentence="did you mean BATON_ENGINE_KV_CACHE_GIB?"
    ),
    "a setting's letter": Mistake(words="up --config typo.yaml", sentence="did you mean engine.max_num_seqs?"),
    "a file that is not there": Mistake(words="up --config none.yaml", sentence="none.yaml"),
    "YAML that is none": Mistake(words="up --config bad.yaml", sentence="cannot read the configuration bad.yaml: "),
    "a word of another server": Mistake(
        words="up", settings={"model_dtype": "fp16"}, sentence="must be one of auto, float32, bfloat16, float16"
    ),
    "a block of 17 tokens": Mistake(
        words="up", settings={"engine_block_size": "17"}, sentence="engine.block_size must be a multiple of 16, got 17"
    ),
    "a model's letter": Mistake(words="up --model smollm-135m", sentence="Did you mean smollm2-135m-instruct?"),
    "a folder without a model": Mistake(
        words="up --model ./", sentence="give the folder that holds config.json, the .safetensors files and tokenizer"
    ),
    "a folder that is not there": Mistake(words="up --model ./none", sentence="none does not exist"),
    "a model that writes nothing": Mistake(
        words="up --model {models}/bert", sentence="holds a BertModel; this version runs models that continue a text"
    ),
    "weights of another format": Mistake(
        words="up --model {models}/bin", sentence="Convert them with transformers' save_pretrained"
    ),
    "a download that broke off": Mistake(words="up --model {models}/short", sentence="copy or download it again"),
    "a port that is taken": Mistake(
        words="up", settings={"grpc_port": TAKEN}, sentence="set BATON_GRPC_PORT to another port"
    ),
    "one port for both": Mistake(
        words="up",
        settings={"grpc_port": FREE, "http_port": FREE},
        sentence="both BATON_GRPC_PORT and BATON_HTTP_PORT are {free}; set BATON_HTTP_PORT to another port",
    ),
    "an address of another machine": Mistake(
        words="up", settings={"cluster_host": "192.0.2.1"}, sentence="Cannot assign requested address"
    ),
    "no decode worker": Mistake(words="up --decode 0", sentence="there must be at least 1 decode worker"),
    "a GPU that is not there": Mistake(
        words="up", settings={"model_device": "cuda"}, sentence="set model.device to cpu"
    ),
    "weights for a GPU": Mistake(
        words="up",
        settings={"model_weights": "fp8"},
        sentence="but this machine has no GPU; set it to exact",
        needs_model=True,
    ),
    "more memory than there is": Mistake(
        words="up",
        settings={"engine_kv_cache_gib": "5000"},
        sentence="set engine.kv_cache_gib to auto or at most",
        needs_model=True,
    ),
    "more workers than there is memory for": Mistake(
        words="up --prefill 200", sentence="weights and processes of 201 ranks need", needs_model=True
    ),
    "ranks that do not divide the heads": Mistake(
        words="up", settings={"engine_tensor_parallel": "4"}, sentence="does not divide the 9 heads", needs_model=True
    ),
    "a cache that cannot be written": Mistake(words="up", settings={"cache": "/proc/none"}, sentence="BATON_CACHE"),
    "a Redis that does not run": Mistake(
        words="up",
        settings={"index_redis_url": "redis://127.0.0.1:{free}"},
        sentence="start it, or unset index.redis_url (BATON_INDEX_REDIS_URL)",
    ),
    "a Ray without a secret": Mistake(
        words="up --ray-address 127.0.0.1:{free}", sentence="set cluster.secret (BATON_CLUSTER_SECRET) to a file"
    ),
    "a Ray that does not run": Mistake(
        words="up --ray-address 127.0.0.1:{free}",
        settings={"cluster_secret": SECRET},
        sentence="start one with `ray start --head`, or omit the address",
    ),
    "a tenants' file that is not there": Mistake(
        words="up", settings={"router_tenants_file": "/none.yaml"}, sentence="fix the file, or mount the Secret"
    ),
    "a certificate that is not there": Mistake(
        words="up",
        settings={"router_tls_certificate": "/none.pem", "router_tls_key": "/none.key"},
        sentence="must name matching PEM files",
    ),
    "no cluster": Mistake(words="generate Hello --address 127.0.0.1:{free}", sentence="start one with `baton up`"),
    "an address with a scheme": Mistake(
        words="status --address https://127.0.0.1:{free}", sentence="must be host:port; set 127.0.0.1:"
    ),
    "an address without a port": Mistake(
        words="status --address localhost", sentence="must be host:port, such as localhost:50051"
    ),
    "the port of HTTP": Mistake(words="status --address http://127.0.0.1:{taken}", sentence="set the port after grpc="),
}


def write_files(folder: Path) -> None:
    """Writes the files that some of the commands name."""
    (folder / "typo.yaml").write_text("engine: {max_num_seq: 8}\n")
    (folder / "bad.yaml").write_text("engine: {max_num_seqs: 8\ncluster: [\n")


def broken_models(folder: Path) -> None:
    """Makes folders of models that cannot be served, each for one reason."""
    whole: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for name, config in (
        ("bert", {"model_type": "bert", "architectures": ["BertModel"]}),
        ("bin", whole),
        ("short", whole),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "bin" / "pytorch_model.bin").write_bytes(b"x")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "short" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
