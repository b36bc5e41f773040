def figures(*a):
    return iter(())
