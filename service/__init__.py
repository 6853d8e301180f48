"""capserve: Capsule Networks over HTTP. FastAPI and ONNX Runtime; never torch."""
