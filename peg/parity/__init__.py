"""Whether two ways to run a model say the same: one rank and several, and either and a reference."""
