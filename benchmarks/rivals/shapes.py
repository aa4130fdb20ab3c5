"""Write `models.json`: the sizes of the trained tensors of the networks of CCGrid'19.

Run `PYTHON -m benchmarks.rivals.shapes` with a PYTHON that has keras, which defines the
architectures. The multiply-adds of a forward pass per image are those of the networks'
publications.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

WHERE: Final = Path(__file__).with_name("models.json")
GIGA_MACS: Final = {"MobileNet": 0.57, "ResNet-50": 4.1, "NASNet-large": 23.8}


def main() -> None:
    """Write the file."""
    from keras import __version__, applications  # type: ignore[import-not-found,unused-ignore]

    made: dict[str, Any] = {
        "MobileNet": applications.MobileNet,
        "ResNet-50": applications.ResNet50,
        "NASNet-large": applications.NASNetLarge,
    }
    models = {
        name: {
            "giga_macs": GIGA_MACS[name],
            "tensors": [math.prod(w.shape) for w in make(weights=None).trainable_weights],
        }
        for name, make in made.items()
    }
    text = json.dumps({"source": f"keras.applications {__version__}", "models": models})
    WHERE.write_text(text.replace('"giga_macs"', '\n "giga_macs"') + "\n")


if __name__ == "__main__":
    main()
