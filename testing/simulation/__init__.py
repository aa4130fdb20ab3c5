"""The whole protocol on a virtual clock, with faults, and checkers of its promises."""
