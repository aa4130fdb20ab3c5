"""The round log and what follows from it: the same on every rank (R2).

Reading order: ids and records (the nouns), log, deal (who holds which lease), pending (a rank's own
gradients), trigger (when a round starts).
"""
