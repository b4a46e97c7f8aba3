"""The prompt cache: reuse prefixes in memory, across branches and across restarts."""
