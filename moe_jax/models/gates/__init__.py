"""Gates: which experts a token goes to and how much each counts. One file each, one signature."""

from moe_jax.models.gates import sigmoid, softmax

GATES = {"softmax": softmax.choose, "sigmoid": sigmoid.choose}
