"""The one exception that means: the user asked for something that cannot be done."""


class JzeroError(ValueError):
    """A mistake in what the user gave: a configuration key, a shape, a mesh, a file or a checkpoint.

    Its message is a single line that names the thing, what was expected, what was found and what to do about it. The
    command line prints that line and exits with status 2; everything else that escapes is a bug and shows a traceback.

    Example:
        >>> raise JzeroError("model.num_layers: expected at least 1, found 0; set a positive number of layers")
        Traceback (most recent call last):
            ...
        jzero.errors.JzeroError: model.num_layers: expected at least 1, found 0; set a positive number of layers
    """
