"""The board in real browsers: access, real boxes, models, faults, an hour; `make test-board`."""
