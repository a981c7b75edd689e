"""Our own tasks, one module each: prompt text and its correct answer."""
