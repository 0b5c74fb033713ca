"""Model of a fleet: many followers of one store, a staged rollout, failures, and the sizes of it."""
