def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true", help="write the records in tests/golden anew")
