"""The whole protocol on a virtual clock, with injected faults and checkers of its promises."""
