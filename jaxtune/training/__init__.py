"""The compiled step: `assembly` puts the program of a run together, `step` and `pipelined_step` compute it, `state` is
what it changes, `memory` finds the rematerialisation policy that fits.
"""
