"""One reply pass by pass: what is recorded of it, what a pass reads and computes, what else the model might have said."""
