"""The peak speeds of GPUs by name, from their makers' data sheets: of dense products of bf16 or fp16 matrices.

GPUs that have products of fp8 matrices compute these at twice the speed.
"""

from __future__ import annotations

# TFLOP/s. The first entry whose words are all in the name of the device counts.
_PEAKS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("MI300X", 1307.0),
    ("MI250X", 383.0),
)


def peak_of(device: str, plan: str) -> float | None:
    """Returns the peak in operations per second of a device with this name; None if the plan has no precision."""
    if not any(f"precision={precision}" in plan for precision in ("bf16", "fp16", "fp8")):
        return None
    names, factor = device.replace("-", " ").split(), 2e12 if "precision=fp8" in plan else 1e12
    peaks = (factor * peak for words, peak in _PEAKS if all(word in names for word in words.split()))
    return next(peaks, None)
