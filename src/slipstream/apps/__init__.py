"""What is built on the public face: command line, service, benchmarks, measurements, studies."""
