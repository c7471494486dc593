"""What an inference worker uses: `Client` and its verbs (put, get, push, pull, share, send), one module for each."""
