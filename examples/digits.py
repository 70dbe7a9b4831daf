"""Reads handwritten digits with a network of two layers, in a loop that would leak without a sweep.

Each step computes statistics of the parameters for the progress bar. The parameters are tracked, so the statistics are
as well, but no backward pass ever runs through them: nothing would ever remove their nodes from a graph that is only
cleaned by backward. Here the node count after the last epoch is that after the first, and nothing below asks for it.

    python -m pip install '.[examples]'
    python examples/digits.py                # or, to see the graph summed up: sweepgrad run examples/digits.py
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import sweepgrad as sg

BATCH = 64
NEEDED = 0.97  # of the test scans read correctly


def layer(rng, inputs, outputs, device):
    """Weights at the scale that suits relu (He et al., arXiv:1502.01852), and biases."""
    arrays = rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)), np.zeros(outputs)
    return [sg.asarray(array, dtype="float32", device=device, requires_grad=True) for array in arrays]


def logits(parameters, images):
    w1, b1, w2, b2 = parameters
    return sg.relu(images @ w1 + b1) @ w2 + b2


def cross_entropy(scores, labels):
    return -sg.log_softmax(scores)[np.arange(len(labels)), labels].mean()


def statistics(parameters):
    """Means, norms, and a penalty that is added to no loss: all tracked, none ever differentiated."""
    means = [p.mean() for p in parameters]
    norms = [sg.sqrt(sg.sum(p * p)) for p in parameters]
    return means, norms, 1e-4 * sum(norm * norm for norm in norms)


def resident_bytes():
    """Memory that this process occupies, or None where there is no `/proc` to tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


def main():
    parser = argparse.ArgumentParser(description="Train a network to read digits, and watch the graph stay small.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the split, the first weights and the batches")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for a GPU (needs sweepgrad's extra cu12 or cu13)")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")

    scans, digits = load_digits(return_X_y=True)  # 1797 scans of 8x8 pixels from 0 to 16
    x, x_test, y, y_test = train_test_split(
        scans.astype("float32") / 16, digits, test_size=0.25, stratify=digits, random_state=options.seed
    )
    rng = np.random.default_rng(options.seed)
    try:
        parameters = layer(rng, 64, 128, options.device) + layer(rng, 128, 10, options.device)
    except sg.SweepgradError as error:
        parser.error(str(error))
    x, x_test = (sg.asarray(scans, device=options.device) for scans in (x, x_test))
    optimizer = sg.optim.Adam(parameters, lr=2e-3)

    history = []  # nodes and memory after each epoch
    epochs = tqdm(range(options.epochs), unit="epoch", disable=options.no_progress)
    for _ in epochs:
        for batch in np.array_split(rng.permutation(len(x)), len(x) // BATCH):
            loss = cross_entropy(logits(parameters, x[batch]), y[batch])
            means, norms, _ = statistics(parameters)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        graph = sg.graph.stats()
        history.append((graph.nodes, resident_bytes()))
        saved = f"{graph.saved_bytes / 1024:.0f} KiB"
        epochs.set_postfix(
            loss=f"{loss:.3f}", mean=f"{means[0]:.3f}", norm=f"{norms[0]:.1f}", nodes=graph.nodes, saved=saved
        )

    with sg.no_grad():
        accuracy = np.mean(logits(parameters, x_test).argmax(axis=-1).numpy() == y_test)
    (first_nodes, first_bytes), (last_nodes, last_bytes) = history[0], history[-1]
    print(f"test accuracy: {accuracy:.2%}")
    print(f"nodes: {first_nodes} after the first epoch, {last_nodes} after the last")
    if first_bytes is not None:
        print(f"memory: {(last_bytes - first_bytes) / 2**20:+.1f} MiB after the first epoch")
    if accuracy < NEEDED:
        sys.exit(f"digits.py: the accuracy is below {NEEDED:.0%}; train longer (--epochs)")
    if last_nodes > first_nodes:
        sys.exit("digits.py: the graph grew, which is a fault in sweepgrad; please report it")


if __name__ == "__main__":
    main()
