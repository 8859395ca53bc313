"""What islands cost and save: DiLoCo's loss beside that of synchronous training, and how much of a slow link it hides.

Usage: diloco.py tune | loss | table | hidden [--plans PLAN ...] [--seeds N] [--after STEPS] [--record FILE] ...

- tune: the demo's GPT (examples/gpt.py), synchronous, with several learning rates: bits per byte of held-out text.
- loss: the same with the best of these, 4 islands of H = 64 steps after as many samples, beside synchronous training,
  or --plans; --seeds of each. All islands are on one worker: who computes them makes no difference.
- table: of one seed, for several numbers of islands and steps, fragments, delays and codes, or --plans.
- hidden, as root: two hosts of one worker and island each, network namespaces whose interfaces let so many Mbit/s out
  (token bucket); a step is a fixed time that is slept. How much longer a round takes than on a link that is not
  capped, merged at its end and in fragments; and bytes by the interfaces' counters, beside those of data parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from slow_link import counted, on_two_hosts
from turns import record

RATES, RATE, ISLANDS = (2e-3, 4e-3, 8e-3), 4e-3, "local=4 every=64"
LOSS = ("", ISLANDS)
TABLE = (
    *("", "local=2 every=64", "local=8 every=64", "local=4 every=16", "local=4 every=240"),
    *(f"{ISLANDS} outer_codec=int4", f"{ISLANDS} fragments=3 delay=2", f"{ISLANDS} outer=sgd:1"),
)
WIDTH, DEPTH, SLEEP, ROWS = 1024, 4, 0.2, 8  # of the model on two hosts; seconds of a step
HIDDEN = "local=2 every=16 outer_codec=int8"
SIDES = {
    "data": "",
    "at the end": HIDDEN,
    "in fragments": f"{HIDDEN} fragments=4 delay=2",
    "whole, in fragments": "local=2 every=16 fragments=4 delay=2",
}


def learn(plan: str, rate: float, seed: int, steps: int) -> None:
    """Trains the demo's model; prints the held-out bits per byte."""
    import torch
    from torch.utils.data import Subset

    import paceline

    torch.set_num_threads(1)
    example = Path(__file__).parents[1] / "examples" / "gpt.py"
    demo: dict[str, Any] = {"__name__": "demo"}
    exec(compile(example.read_text().partition("\ntraining, held_out")[0], example, "exec"), demo)  # not its training
    training, held_out = demo["source"]()
    some, math, whole = Subset(held_out, range(0, len(held_out), len(held_out) // 128)), demo["math"], demo["STEPS"]
    trainer = paceline.Trainer(
        model=demo["GPT"],
        loss=demo["loss"],
        optimizer=lambda params: torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.98), weight_decay=0.05),
        global_batch=16,
        forward=lambda model, batch: model(batch[0][:, :-1].long()),
        schedule=lambda step: min((step + 1) / 40, 0.02 + 0.98 * math.cos(math.pi / 2 * min(step / whole, 1)) ** 2),
        clip_norm=1.0,
        seed=seed,
        plan=plan,
    )
    for _ in trainer.steps(training, count=steps or whole):
        pass
    found = trainer.evaluate(some, lambda output, batch: {"bits": demo["loss"](output, batch)})
    print("\n" + json.dumps(found["bits"]))


def learned(runs: Iterable[tuple[str, float, int]], steps: int, after: int) -> dict[tuple[str, float, int], float]:
    """The held-out bits per byte of each plan, rate and seed; as many at a time as there are cores."""

    def one(run: tuple[str, float, int]) -> float:
        plan, rate, seed = run
        with tempfile.TemporaryDirectory() as folder:
            env, out = {**os.environ, "PACELINE_RUN_DIR": folder} if after else None, ""
            stages = [("", {"PACELINE_MAX_STEPS": f"{after}"}), (plan, {})] if after else [(plan, {})]
            for words, more in stages:
                role = [sys.executable, __file__, "learn", "--as", words, f"{rate}", f"{seed}", f"{steps}"]
                process = subprocess.run(role, env=env and {**env, **more}, capture_output=True, text=True)
                if process.returncode:
                    raise SystemExit(process.stderr)
                out = process.stdout
        bits = float(out.splitlines()[-1])
        print(f"{plan or 'synchronous'}, rate {rate:g}, seed {seed}: {bits:.4f} bits per byte", flush=True)
        return bits

    waiting = [*runs]
    with ThreadPoolExecutor(os.cpu_count()) as at_a_time:
        return dict(zip(waiting, at_a_time.map(one, waiting), strict=True))


def travel(plan: str, rounds: int) -> None:
    """Of a worker on one of two hosts: when each turn ended, and the bytes that had left by then."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def slept(output: Any, batch: Any) -> Any:
        time.sleep(SLEEP / 2)  # of the two micro-batches of an island's or a worker's step
        return F.mse_loss(output, batch[0])

    rows = TensorDataset(torch.randn(1024, WIDTH))
    trainer = paceline.Trainer(
        lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]),
        slept,
        lambda params: torch.optim.SGD(params, lr=1e-3),
        global_batch=ROWS,
        plan=f"micro={ROWS // 4} {plan}",
    )
    ends, bytes_ = [], []
    for _ in trainer.steps(rows, count=rounds * (trainer.plan.every or 4)):
        ends.append(time.perf_counter())
        bytes_.append(counted())
    waited = trainer._group.ledger.get("merges", [0, 0, 0.0])
    print(
        "\n"
        + json.dumps({"ends": ends, "bytes": bytes_, "waited": waited[2] / rounds, "turn": trainer.plan.every or 1})
    )


def hidden(mbit: int, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for side, plan in SIDES.items():
        for rate in (mbit, 0) if plan else (0,):
            said, _ = on_two_hosts([__file__, "travel", "--as", plan, str(rounds)], rate)
            ends, turn = said[0]["ends"], said[0]["turn"]
            took = [after - before for before, after in pairwise(ends)]
            sent = max((one["bytes"][-1] - one["bytes"][0]) / (len(ends) - 1) / turn for one in said)
            waited = max(one["waited"] for one in said)
            one = {"seconds": statistics.median(took), "took": took, "sent": sent, "waited": waited, "said": said}
            results.setdefault(side, {})[f"{rate}"] = one
            link = f"{rate} Mbit/s" if rate else "not capped"
            text = f"{side}, {link}: {one['seconds']:.3f} s for {turn} steps, {sent / 1e6:.3f} MB a step"
            print(f"{text}, stood still {waited:.3f} s a round for merges", flush=True)
    gradient = 4 * DEPTH * (WIDTH + 1) * WIDTH
    for side in [*SIDES][1:]:
        slow, fast = (results[side][rate] for rate in (f"{mbit}", "0"))
        share = fast["sent"] / results["data"]["0"]["sent"]
        longer = slow["seconds"] - fast["seconds"]
        print(f"{side}: a round takes {longer:.3f} s longer at {mbit} Mbit/s; {share:.3%} of data parallel's bytes")
    end, streamed = (results[side][f"{mbit}"] for side in ("at the end", "in fragments"))
    free = [results[side]["0"] for side in ("at the end", "in fragments")]
    hidden = {
        what: 1 - (streamed[what] - free[1][what]) / (end[what] - free[0][what]) for what in ("waited", "seconds")
    }
    for what, part in hidden.items():
        print(f"hidden by fragments, by {what}: {part:.1%} of what the link takes at the end of a round")
    return {"gradient": gradient, "hidden": hidden, "sides": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tune", "loss", "table", "hidden", "learn", "travel"])
    parser.add_argument("--plans", nargs="*", default=[], help='"" is synchronous training')
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the demo's")
    parser.add_argument("--after", type=int, default=0, help="islands begin after so many synchronous steps")
    parser.add_argument("--mbit", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", nargs="+", dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "learn":
        plan, rate, seed, steps = options.role
        return learn(plan, float(rate), int(seed), int(steps))
    if options.part == "travel":
        return travel(options.role[0], int(options.role[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go with it
    if options.part == "hidden":
        results: Any = hidden(options.mbit, options.rounds)
    else:
        runs = {
            "tune": [("", rate, 0) for rate in RATES],
            "loss": [(plan, options.rate, seed) for seed in range(options.seeds) for plan in options.plans or LOSS],
            "table": [(plan, options.rate, 0) for plan in options.plans or TABLE],
        }[options.part]
        found = learned(runs, options.steps, options.after)
        results = [[*one, bits] for one, bits in found.items()]
        for plan in dict.fromkeys(plan for plan, *_ in runs) if options.part != "tune" else ():
            pairs = [(bits, found.get(("", rate, seed))) for (p, rate, seed), bits in found.items() if p == plan]
            text = f"{plan or 'synchronous'}: {statistics.fmean(bits for bits, _ in pairs):.4f} bits per byte"
            ratios = [bits / other - 1 for bits, other in pairs if other]
            print(text + (f", {statistics.fmean(ratios):+.2%} beside synchronous training" if ratios else ""))
    if options.record:
        record(options.record, results=results)
    return None


if __name__ == "__main__":
    main()
