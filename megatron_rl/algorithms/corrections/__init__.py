"""One file per mismatch correction: a class ``Correction``, see ``extension.Extension``.

A correction undoes the mismatch between the trainer's policy and the engine's, ``pi_old / pi_inference``. The loss
keeps its denominator: a rejected token counts with loss 0, otherwise rejecting half of the tokens would double the step
size of the rest.
"""
