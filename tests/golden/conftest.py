def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true", help="write tests/golden/recipes/*.json anew")
