"""An agent's decisions: the life of its rank processes, and what their ends and networks mean."""
