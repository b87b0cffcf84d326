"""Options of the tests."""


def pytest_addoption(parser):
    parser.addoption("--images", type=int, default=150, help="how many random images other readers read too")
