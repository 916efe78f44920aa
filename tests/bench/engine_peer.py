"""Another make's engine, in that make's own Python: `python engine_peer.py KIND PRECISION MODEL_DIR SCRATCH_DIR`.

It imports nothing of ours and runs by path. The first line that it writes says what it is (`name`, `precision`), or
why it cannot be started (`error`). Each line that it reads, `{"op": "prefill" | "decode", "prompts": [[ids]],
"num_steps": n}`, is answered with one of `{"num_tokens", "wall_s", "cpu_s", "answers"}`. What a make needs converted is
converted once, into the scratch folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 512
"""Most tokens of a step, as of ours."""
WITHOUT_AMX = "default without AMX"
"""A way to run OpenVINO, whose AMX code traps on some virtual machines."""
Clocks = tuple[float, float]
Answers = list[list[int]]


def clocks() -> Clocks:
    return time.perf_counter(), time.process_time()


class OpenVino:
    """GenAI's continuous batching, stepped."""

    def __init__(self, precision: str, model: Path, scratch: Path) -> None:
        if precision == WITHOUT_AMX:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        np, openvino, genai = map(importlib.import_module, ("numpy", "openvino", "openvino_genai"))
        folder = scratch / "openvino"
        if not (folder / "openvino_model.bin").exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._convert(model, folder)
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1}
        self.precision = f"its {precision}"
        if precision == "float32":
            settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
            self.precision = "float32, KV as well"
        limits = genai.SchedulerConfig()
        limits.cache_size = 1
        limits.enable_prefix_caching = False
        limits.dynamic_split_fuse = True
        limits.max_num_seqs = 32
        limits.max_num_batched_tokens = CHUNK
        self.name = f"OpenVINO GenAI {importlib.metadata.version('openvino-genai')}"
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), limits, "CPU", settings)
        self._tensor: Callable[[list[int]], Any] = lambda ids: openvino.Tensor(np.array([ids], np.int64))
        self._config = genai.GenerationConfig
        self._num_requests = 0

    @staticmethod
    def _convert(model: Path, folder: Path) -> None:
        """The converter prints what goes wrong; its module is where the interpreter is."""
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
        task = ["--task", "text-generation-with-past", "--weight-format", "fp32", str(folder)]
        subprocess.run([*command, *task], check=True, stdout=sys.stderr)

    def run(self, prompts: list[list[int]], num_steps: int) -> tuple[Clocks, Clocks, Clocks, Answers]:
        config = self._config()
        config.max_new_tokens = num_steps + 64
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        begin = clocks()
        handles = []
        for prompt in prompts:
            handles.append(self._pipeline.add_request(self._num_requests, self._tensor(prompt), config))
            self._num_requests += 1
        answers: Answers = [[] for _ in prompts]
        while not all(answers):
            self._step(handles, answers)
        first = clocks()
        for _ in range(num_steps):
            self._step(handles, answers)
        end = clocks()
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return begin, first, end, [answer[: num_steps + 1] for answer in answers]

    def _step(self, handles: list[Any], answers: Answers) -> None:
        self._pipeline.step()
        for handle, answer in zip(handles, answers, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    answer += output.generated_ids


class LlamaCpp:
    """`llama_decode`, declared by llama-cpp-py-sync, and the greatest logit by numpy.

    The library is that which the environment variable LLAMA_CPP_LIB names, or the one inside the wheel of xllamacpp, of
    which the version must be that of the declarations.
    """

    def __init__(self, precision: str, model: Path, scratch: Path) -> None:
        self._np = importlib.import_module("numpy")
        self._ffi = ffi = importlib.import_module("llama_cpp_py_sync._cffi_bindings").ffi
        self._lib = ffi.dlopen(self._library())
        self._quiet = ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda level, text, data: None)
        self._lib.llama_log_set(self._quiet, ffi.NULL)
        self._lib.llama_backend_init()
        path = scratch / f"{precision}.gguf"
        if not path.exists():
            write_gguf(model, path, "F32" if precision == "float32" else precision)
        params = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if self._model == self._ffi.NULL:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._num_logits = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._exact = precision == "float32"
        self.precision = "float32, KV as well" if self._exact else f"{precision}, KV float16"
        flags = self._ffi.string(self._lib.llama_print_system_info()).decode()
        self.name = f"llama.cpp {importlib.metadata.version('llama-cpp-py-sync')} ({', '.join(cpu_flags(flags))})"
        self._contexts: dict[tuple[int, int], Any] = {}
        self._batch = self._lib.llama_batch_init(CHUNK, 0, 1)

    @staticmethod
    def _library() -> str:
        named = os.environ.get("LLAMA_CPP_LIB")
        spec = None if named else importlib.util.find_spec("xllamacpp")
        folders = spec.submodule_search_locations if spec else []
        return named or str(next(path for folder in folders or () for path in Path(folder).glob("xllamacpp*.so")))

    def _context(self, num_streams: int, num_tokens: int) -> Any:
        """A context for as many sequences of as many tokens, kept for the next run."""
        room = -(-num_tokens // 256) * 256
        if (num_streams, room) not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max = room * num_streams, num_streams
            params.n_batch = params.n_ubatch = CHUNK
            params.n_threads = params.n_threads_batch = 1
            if self._exact:
                params.type_k = params.type_v = self._lib.GGML_TYPE_F32
            context = self._lib.llama_init_from_model(self._model, params)
            if context == self._ffi.NULL:
                raise RuntimeError(f"llama.cpp has no context of {num_streams} sequences of {room} tokens")
            self._contexts[num_streams, room] = context
        return self._contexts[num_streams, room]

    def run(self, prompts: list[list[int]], num_steps: int) -> tuple[Clocks, Clocks, Clocks, Answers]:
        context = self._context(len(prompts), max(map(len, prompts)) + num_steps + 1)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        begin = clocks()
        answers: Answers = []
        for number, prompt in enumerate(prompts):
            for at in range(0, len(prompt), CHUNK):
                rows = [(token, at + i, number) for i, token in enumerate(prompt[at : at + CHUNK])]
                found = self._decode(context, rows, [len(rows) - 1] if at + CHUNK >= len(prompt) else [])
            answers.append(found)
        first = clocks()
        for step in range(num_steps):
            rows = [(answer[-1], len(prompts[i]) + step, i) for i, answer in enumerate(answers)]
            for answer, token in zip(answers, self._decode(context, rows, range(len(rows))), strict=True):
                answer.append(token)
        return begin, first, clocks(), answers

    def _decode(self, context: Any, rows: list[tuple[int, int, int]], wanted: Any) -> list[int]:
        """Returns the greedy tokens that follow the wanted rows, each of a token, its position and its sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, number) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, number
            batch.logits[i] = i in wanted
        if self._lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        num_bytes = 4 * self._num_logits
        return [
            int(
                self._np.frombuffer(
                    self._ffi.buffer(self._lib.llama_get_logits_ith(context, i), num_bytes), "f4"
                ).argmax()
            )
            for i in wanted
        ]


class Vllm:
    """The engine of vLLM's wheel for CPUs, stepped in this process."""

    def __init__(self, precision: str, model: Path, scratch: Path) -> None:
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_AOT_COMPILE": "0",  # what it keeps of that does not load again in 0.32
            "VLLM_CACHE_ROOT": str(scratch / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        vllm = importlib.import_module("vllm")
        self.name = f"vLLM {importlib.metadata.version('vllm')}"
        self.precision = f"{precision}, KV as well"
        self._engine = vllm.LLM(
            model=str(model),
            dtype=precision,
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=CHUNK,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        ).llm_engine
        self._params = vllm.SamplingParams
        self._num_requests = 0

    def run(self, prompts: list[list[int]], num_steps: int) -> tuple[Clocks, Clocks, Clocks, Answers]:
        params = self._params(max_tokens=num_steps + 64, temperature=0.0, ignore_eos=True, detokenize=False)
        begin = clocks()
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            answers[str(self._num_requests)] = []
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
            self._num_requests += 1
        while not all(answers.values()):
            self._step(answers)
        first = clocks()
        wanted = {name: len(answer) + num_steps for name, answer in answers.items()}
        while any(len(answer) < wanted[name] for name, answer in answers.items()):
            self._step(answers)
        end = clocks()
        self._engine.abort_request(list(answers))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return begin, first, end, [answer[: num_steps + 1] for answer in answers.values()]

    def _step(self, answers: dict[str, list[int]]) -> None:
        """Some steps give a stream no token: they may begin before the last one has ended."""
        for output in self._engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)


def cpu_flags(system_info: str) -> list[str]:
    """The instruction sets, among those of which there are many, for which a llama.cpp is built."""
    present = {
        part.split("=")[0].split(":")[-1].strip() for part in system_info.split("|") if part.strip().endswith("1")
    }
    return sorted(present & {"AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8"}) or ["no AVX2"]


def write_gguf(model: Path, path: Path, kind: str) -> None:
    """Writes a Llama of one safetensors file, its matrices as `kind` (F32 is bit for bit), without its tokenizer."""
    gguf, np = map(importlib.import_module, ("gguf", "numpy"))
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise RuntimeError(f"only models of type llama are converted, not {config['model_type']}")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    types = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with (model / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + size + begin)
            values = np.frombuffer(file.read(end - begin), "<f4").reshape(entry["shape"])
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbours
                count = heads[name[-len("q_proj.weight")]]
                halves = values.reshape(count, 2, len(values) // count // 2, -1)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(entry["shape"])
            stored = types[kind if values.ndim == 2 else "F32"]
            packed = gguf.quantize(values, stored)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


KINDS: dict[str, Callable[[str, Path, Path], Any]] = {"openvino": OpenVino, "llama.cpp": LlamaCpp, "vllm": Vllm}


def main() -> None:
    kind, precision, model, scratch = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not answer for us
    Path(scratch).mkdir(parents=True, exist_ok=True)
    try:
        peer = KINDS[kind](precision, Path(model), Path(scratch))
        peer.run([[1, 2, 3]], 1)  # what breaks does so before it counts as started
    except Exception as error:  # whatever it is, the report says it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"name": peer.name, "precision": peer.precision}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        prompts, num_steps = question["prompts"], question["num_steps"]
        begin, first, end, tokens = peer.run(prompts, num_steps)
        since, until = (first, end) if question["op"] == "decode" else (begin, first)
        num_tokens = num_steps * len(prompts) if question["op"] == "decode" else sum(map(len, prompts))
        print(
            json.dumps(
                {
                    "num_tokens": num_tokens,
                    "wall_s": until[0] - since[0],
                    "cpu_s": until[1] - since[1],
                    "answers": tokens,
                }
            ),
            file=answers,
        )


if __name__ == "__main__":
    main()
