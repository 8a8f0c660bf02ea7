"""Everything that knows vLLM.

engine            generation and scoring, in this process
weights           new weights into the engine's memory; recorder and plan find their places, audit reads them back
routes            the experts chosen for each token
"""
