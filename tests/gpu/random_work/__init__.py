# SPDX-License-Identifier: BSD-3-Clause
"""The parts of random_torch_work.py: what a worker does, graphs, sharing, and the comparisons."""
