"""Names of collectives in the background, in programs and in traces of them. Imports no jax."""

START_SCOPE, FINISH_SCOPE = "background_start", "background_finish"
STARTED = "started in the background"
ARRIVING = "arriving in the background"
