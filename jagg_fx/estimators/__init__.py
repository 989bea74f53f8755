"""Estimators as plain data: which steps of a group keep their backward, and with which weights.

Every estimator has one form (`n` steps in a group, cotangents g_k, Jacobians J_j):

    gradient of a group = sum over nodes j of  J_j^T  sum over steps k of  C[j, k] g_k

so an estimator is a list of nodes and a weight matrix C. A node is a fixed step, or one that is drawn anew each
time, per row of the batch. Nothing here knows a graph: weights are computed from the times by ordinary tensor
code, which `passes/merge.py` traces into the graph and tests call as it is.
"""

from .base import Base, Estimator, Weight, index_lambdas, lambdas
from .composite import ESTIMATORS, Alternating, Debiased, Memory, Quadratic, Schedule, resolve
from .groups import Corrected, Correction, Endpoints, Exact, Inner, Lagrange, Subset
from .lanes import Causal, Knots

__all__ = [
    "ESTIMATORS",
    "Alternating",
    "Base",
    "Causal",
    "Corrected",
    "Correction",
    "Debiased",
    "Endpoints",
    "Estimator",
    "Exact",
    "Inner",
    "Knots",
    "Lagrange",
    "Memory",
    "Quadratic",
    "Schedule",
    "Subset",
    "Weight",
    "index_lambdas",
    "lambdas",
    "resolve",
]
