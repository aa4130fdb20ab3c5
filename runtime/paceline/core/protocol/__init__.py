"""The round log, and the state that every rank derives from it in the same way (R2).

Reading order: `ids` and `records` (the data types), `log`, `deal` (which rank holds which lease),
`pending` (the gradients of one rank), `trigger` (when a round starts).
"""
