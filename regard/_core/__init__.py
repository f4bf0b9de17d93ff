"""One call, from its arguments to a backend: options, validation, problem, dispatch, execution."""
