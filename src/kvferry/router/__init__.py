"""The router: which worker a request goes to, decided purely (here) and carried out (``router.http``)."""
