"""A Gradio application that shows drafted, repaired, looped and bonus tokens, and the time won."""
