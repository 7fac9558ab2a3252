"""A rank that has imported torch, and sleeps."""

import time

import torch  # noqa: F401

print("begun", flush=True)
time.sleep(600)
