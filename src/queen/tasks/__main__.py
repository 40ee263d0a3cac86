from queen.tasks.command import main

main()
