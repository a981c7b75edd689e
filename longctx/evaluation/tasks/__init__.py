"""Our own tasks, a module each: what a prompt says, and what is right after it."""
