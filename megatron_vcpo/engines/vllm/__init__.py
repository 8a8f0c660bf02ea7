"""All that knows vLLM.

engine            generation and scoring, in this process
weights           new weights into the engine's memory; recorder and plan find out where each goes, audit reads it back
routes            the experts that served each token
"""
