"""verl's PPO trainer in a process that ends when the pipe on its stdin closes: it does not outlive who started it."""

from __future__ import annotations

import os
import runpy
import threading


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
