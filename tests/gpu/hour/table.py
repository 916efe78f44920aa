"""The checks, by name, in the order in which their slot runs them: what tells most comes first."""

from __future__ import annotations

from tests.gpu.hour.checks import Check

MODES = ("nonblocking-eager", "nonblocking-lazy", "blocking-eager", "blocking-lazy")
DEATHS = [f"{how} {phase}" for phase in ("idle", "receiving", "sending", "opening") for how in ("kill", "stop")]

_ALL = [
    Check(name="machine", slot=1, expected="torch >= 2.11, a driver for its CUDA, NCCL", limit_s=60, where="facts:machine"),
    Check(name="names", slot=1, expected="nothing is missing", limit_s=60, where="facts:names", needs="cuda build"),
    Check(name="environment", slot=1, expected="nothing is unknown", limit_s=60, where="facts:environment", needs="cuda build"),
    Check(name="streams", slot=1, expected="32 streams of a priority, all different", limit_s=60, where="facts:streams"),
    *(Check(name=f"pair-{mode}", slot=1, expected="opens in < 30 s, 1,000 messages right, closes in < 2 s", limit_s=110, where="pairs:open_in", argument=mode, rehearses=True) for mode in MODES),
    Check(name="pair-memory", slot=1, expected="at most 84 MiB a pair on one GPU with 4 channels", limit_s=160, where="pairs:memory", rehearses=True),
    *(Check(name=f"death-{case.replace(' ', '-')}", slot=2, expected="known < 1 s after the session (stop-idle: 6 s, opening: 10 s), closed < 6 s, the GPU computes", limit_s=60, where="deaths:death", argument=case, rehearses=True) for case in DEATHS),
    Check(name="inter-token", slot=2, expected="p99 of decode steps while a pair is aborted < 3 x alone", limit_s=90, where="deaths:inter_token"),
    Check(name="many-pairs", slot=2, expected="40 pairs, no stream in common, bytes right", limit_s=210, where="deaths:many_pairs", rehearses=True),
    Check(name="leaks", slot=2, expected="slope 0 over 40 cycles: < 0.25 MiB, no thread, no file a cycle", limit_s=210, where="deaths:leaks", rehearses=True),
    Check(name="attention", slot=3, expected="log probabilities within 1e-3 of the CPU's in float32", limit_s=150, where="engine:attention", rehearses=True),
    Check(name="kernel", slot=3, expected="the engine launches Baton's own attention kernel", limit_s=90, where="engine:kernel"),
    Check(name="tokens-float32", slot=3, expected="answers as on a CPU, but for near ties", limit_s=90, where="engine:tokens", argument="float32", rehearses=True),
    Check(name="tokens-bfloat16", slot=3, expected="answers as on a CPU, but for near ties (margin 0.25)", limit_s=90, where="engine:tokens", argument="bfloat16", rehearses=True),
    Check(name="memory", slot=3, expected="the peak of 64 mixed lengths fits beside an automatic pool", limit_s=100, where="engine:memory", rehearses=True),
    Check(name="backends", slot=3, expected="flash and memory-efficient attention suffice", limit_s=60, where="engine:backends"),
    Check(name="out-of-memory", slot=3, expected="OutOfMemoryError, and right tokens after it", limit_s=60, where="engine:out_of_memory"),
    Check(name="sticky-error", slot=3, expected="two errors, and no recovery", limit_s=60, where="engine:sticky"),
    Check(name="handover-small", slot=4, expected="tokens as in one process", limit_s=80, where="handover:small", argument="tcp", rehearses=True),
    Check(name="handover-ipc", slot=4, expected="tokens as in one process, >= 100 GB/s, tail <= 15 %", limit_s=110, where="handover:whole", argument="ipc"),
    Check(name="handover-tcp", slot=4, expected="tokens as in one process; rate and tail are figures", limit_s=110, where="handover:whole", argument="tcp", rehearses=True),
    Check(name="handover-nccl", slot=4, expected="tokens as in one process, over a socket; rate and tail are figures", limit_s=110, where="handover:whole", argument="nccl"),
    Check(name="nccl-on-one-gpu", slot=4, expected="NCCL refuses it (before 2.30)", limit_s=60, where="handover:refused"),
    Check(name="sanitizer-torch", slot=4, expected="no race, tokens as in one process", limit_s=150, where="handover:sanitizer", argument="torch"),
    Check(name="sanitizer-compute", slot=4, expected="no bad access, tokens as in one process", limit_s=150, where="handover:sanitizer", argument="compute"),
]  # fmt: skip
CHECKS = {check.name: check for check in _ALL}
assert len(CHECKS) == len(_ALL)