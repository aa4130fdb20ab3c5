"""Training loops of others in a job; each module needs the framework that it is named after."""
