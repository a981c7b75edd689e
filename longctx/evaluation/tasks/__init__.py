"""Our own tasks, one module each: the text of a prompt, and its correct answer."""
