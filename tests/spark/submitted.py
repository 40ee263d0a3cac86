"""What is handed to spark-submit: copies a queue to another, and prints which Python read it.

spark-submit ... submitted.py DATABASE_URL
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

spark = SparkSession.builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")


@udf("string")
def prefix(_: str) -> str:
    import queen

    return f"{sys.prefix} {queen.__file__}"


orders = spark.read.format("queen").options(databaseUrls=sys.argv[1], queue="orders").load()
print("READ BY", *{row[0] for row in orders.select(prefix("payload")).collect()})
orders.select("payload").write.format("queen").mode("append").options(databaseUrls=sys.argv[1], queue="copy").save()
spark.stop()
